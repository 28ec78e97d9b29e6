"""Recipes of low-precision training: the spec of each operand of a linear layer's three products, as data.

    output       y  = x · wᵀ    contracts the inputs
    grad_input   gx = g · w     contracts the outputs
    grad_weight  gw = gᵀ · x    contracts the tokens

Each is a · bᵀ of two matrices with the contracted axis last. Blocks of an operand refer to this orientation: ``(-1,)``
is one scale per row of that product, ``(32,)`` one per 32 neighbours along the contracted axis, None one per tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...core.formats import E2M1, E4M3, E5M2, Format
from ...core.spec import INT8_ROW, MXFP4, MXFP8, TERNARY_TENSOR, ActivationSpec, QuantSpec
from ...planning.configs import SpecConfig
from ...support.arguments import did_you_mean, show
from ...support.errors import ArgumentTypeError

FORWARD: Literal["forward"] = "forward"
SEEDS = 1 << 32


@dataclass(frozen=True)
class Operand:
    """One side of a product.

    spec    quantization spec; rule: how its scales are chosen, see :mod:`pennyweight.core.qparams`
    chance  whether codes are rounded stochastically, so that the product is unbiased
    """

    spec: QuantSpec
    rule: str | None = None
    chance: bool = False
    key: str = field(init=False, repr=False, compare=False)  # complete serialization, for graphs

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", json.dumps([self.spec.to_dict(), self.rule, self.chance]))
        if self.spec.layout != "plain" or self.spec.format.kind == "learned":
            raise ValueError(f"an operand needs a fixed format in the plain layout, got {self.spec}")
        if self.spec.block is not None and len(self.spec.block) > 2:
            raise ValueError(f"an operand is a matrix; block {list(self.spec.block)} has more axes")

    @classmethod
    def from_key(cls, key: str) -> Operand:
        spec, rule, chance = json.loads(key)
        return cls(QuantSpec.from_dict(spec), rule, chance)

    def __str__(self) -> str:
        return str(self.spec) + (" stochastic" if self.chance else "")

    def as_format(self, fmt: Format) -> Operand:
        """This operand with another format."""
        return replace(self, spec=self.spec.with_(format=fmt))


Side = Operand | Literal["forward"] | None


@dataclass(frozen=True)
class Gemm:
    """a · bᵀ. A side that is None is not quantized; FORWARD reuses the quantized value from the output's product.

    hadamard  0, or a power of two: size of the groups along the contracted axis that are rotated by a Hadamard matrix
              with random signs, on both sides; leaves the product unchanged and spreads outliers over their block
    """

    a: Side = None
    b: Side = None
    hadamard: int = 0

    def __post_init__(self) -> None:
        n = self.hadamard
        if n < 0 or n & (n - 1):
            raise ValueError(f"hadamard must be 0 or a power of two, got {n}")
        if n and not (isinstance(self.a, Operand) and isinstance(self.b, Operand)):
            raise ValueError("hadamard rotates both sides of a product; both must be quantized")

    @property
    def quantized(self) -> bool:
        return self.a is not None or self.b is not None

    def __str__(self) -> str:
        if not self.quantized:
            return "high precision"
        text = " x ".join("high precision" if s is None else str(s) for s in (self.a, self.b))
        return text + (f", Hadamard {self.hadamard}" if self.hadamard else "")


HIGH = Gemm()


@dataclass(frozen=True)
class Recipe:
    """The three products of a layer. output: input, weight. grad_input: gradient, weight. grad_weight: gradient, input.

    seed  of stochastic rounding and of the signs of Hadamard matrices. The random numbers of an operand are a function
          of the seed, all bits of the gradient, and the element: a resumed run repeats them; there is no state to save
    """

    name: str
    output: Gemm
    grad_input: Gemm = HIGH
    grad_weight: Gemm = HIGH
    seed: int = 0
    key: str = field(init=False, repr=False, compare=False)  # complete serialization, for graphs

    def __post_init__(self) -> None:
        gemms = [
            [*(s.key if isinstance(s, Operand) else s for s in (g.a, g.b)), g.hadamard]
            for g in (self.output, self.grad_input, self.grad_weight)
        ]
        object.__setattr__(self, "key", json.dumps([self.name, gemms, self.seed]))
        if FORWARD in (self.output.a, self.output.b):
            raise ValueError(f"recipe {self.name!r}: the output's own operands cannot be FORWARD")
        if FORWARD in (self.grad_input.a, self.grad_weight.a):
            raise ValueError(f"recipe {self.name!r}: a gradient has no value in the forward pass")
        sides = (("grad_input", self.grad_input.b, self.output.b), ("grad_weight", self.grad_weight.b, self.output.a))
        for what, side, seen in sides:
            if side == FORWARD and seen is None:
                raise ValueError(f"recipe {self.name!r}: {what} uses the forward operand, which is not quantized")
        if not any(g.quantized for g in (self.output, self.grad_input, self.grad_weight)):
            raise ValueError(f"recipe {self.name!r} quantizes nothing")
        if not 0 <= self.seed < SEEDS:
            raise ValueError(f"recipe {self.name!r}: seed must be a 32-bit number, got {self.seed}")

    @classmethod
    def from_key(cls, key: str) -> Recipe:
        name, gemms, seed = json.loads(key)

        def side(s: str | None) -> Side:
            return FORWARD if s == FORWARD else None if s is None else Operand.from_key(s)

        output, grad_input, grad_weight = (Gemm(side(a), side(b), turned) for a, b, turned in gemms)
        return cls(name, output, grad_input, grad_weight, seed)

    def __str__(self) -> str:
        return f"{self.name}: output {self.output}; grad_input {self.grad_input}; grad_weight {self.grad_weight}"

    def with_(self, **changes: Any) -> Recipe:
        """This recipe with some fields changed; the changes are added to its name unless a name is given."""
        return replace(self, **{"name": f"{self.name}*", **changes})

    def with_formats(
        self, input: Format | None = None, weight: Format | None = None, grad_output: Format | None = None
    ) -> Recipe:
        """This recipe with another format for an operand in every product that quantizes it (e5m2 for gradients)."""

        def put(gemm: Gemm, a: Format | None, b: Format | None) -> Gemm:
            sides = [s.as_format(f) if isinstance(s, Operand) and f else s for s, f in ((gemm.a, a), (gemm.b, b))]
            return replace(gemm, a=sides[0], b=sides[1])

        return self.with_(
            output=put(self.output, input, weight),
            grad_input=put(self.grad_input, grad_output, weight),
            grad_weight=put(self.grad_weight, grad_output, input),
        )

    def deployed(self) -> SpecConfig:
        """The config for :func:`pennyweight.quantize_` that gives the same weights and activations as the output's
        product in training. Raises ValueError if the recipe does not quantize the weight, or rotates it."""
        a, b = self.output.a, self.output.b
        if not isinstance(b, Operand) or b.chance or self.output.hadamard:
            raise ValueError(f"recipe {self.name!r}: its output does not use a quantized weight that can be stored")
        act = ActivationSpec(a.spec, "dynamic", a.rule) if isinstance(a, Operand) else None
        return SpecConfig(b.spec, act, b.rule)


def _same(side: Operand, other: Operand | None = None, **more: Any) -> Gemm:
    return Gemm(side, side if other is None else other, **more)


def _stochastic(side: Operand) -> Operand:
    return replace(side, chance=True)


def _three(name: str, side: Operand) -> Recipe:
    return Recipe(name, _same(side), _same(side), _same(side))


def _tensor(fmt: Format) -> Operand:
    return Operand(QuantSpec(fmt, None))


# Power-of-two scales: quantization along rows and along columns then differs only for subnormal values, not in the last
# bit of every element, and gradients match the computed function.
_ROW = Operand(QuantSpec(E4M3, (-1,)), "mx_rceil")
_INT8 = Operand(INT8_ROW, "absmax")
# The smallest power of two without saturation, which would bias stochastic rounding. (Scaling by 3/4 with the floor
# rule, as in Tseng et al. 2025, costs the same on average: a step 4/3 as large, here twice as large in log2(4/3) of the
# cases.)
_MX8, _MX4 = Operand(MXFP8, "mx_rceil"), Operand(MXFP4, "mx_rceil")
_LINE, _SQUARE = Operand(QuantSpec(E4M3, (128,)), "mx_rceil"), Operand(QuantSpec(E4M3, (128, 128)), "mx_rceil")
_NV_SCALE = QuantSpec(E4M3, None)
_NV, _NV_SQUARE = Operand(QuantSpec(E2M1, (16,), _NV_SCALE)), Operand(QuantSpec(E2M1, (16, 16), _NV_SCALE))
_MX4_BACK = _same(_stochastic(_MX4), hadamard=32)
_INT8_BACK = _same(_stochastic(_INT8), _INT8, hadamard=32)

_ALL = (
    # torchao's float8 recipes
    Recipe("tensorwise", _same(_tensor(E4M3)), Gemm(_tensor(E5M2), _tensor(E4M3)), Gemm(_tensor(E5M2), _tensor(E4M3))),
    _three("rowwise", _ROW),
    Recipe("rowwise_with_gw_hp", _same(_ROW), Gemm(_ROW, Operand(QuantSpec(E4M3, None), "mx_rceil"))),
    # DeepSeek-V3 (2024): 1 x 128 for inputs and gradients, 128 x 128 for weights; powers of two as in V3.1
    Recipe("blockwise", Gemm(_LINE, _SQUARE), Gemm(_LINE, _SQUARE), _same(_LINE)),
    # torchao's int8 mixed precision
    _three("int8", _INT8),
    # RTN always loses the small elements of a gradient row; stochastic rounding is unbiased, and after rotation few
    # elements are small.
    Recipe("int8_hadamard", _same(_INT8), _INT8_BACK, _INT8_BACK),
    # OCP MX v1.0; Mishra et al. 2025 (mxfp8), Tseng et al. 2025 (mxfp4 backward: stochastic rounding and Hadamard on
    # both sides)
    _three("mxfp8", _MX8),
    Recipe("mxfp8_with_gw_hp", _same(_MX8), _same(_MX8)),
    Recipe("mxfp8_mxfp4", _same(_MX8), _MX4_BACK, _MX4_BACK),
    Recipe("mxfp4", _same(_MX4), _MX4_BACK, _MX4_BACK),
    # NVIDIA 2025: 16 x 16 for weights, stochastic rounding for gradients, Hadamard for the weight's gradient only
    Recipe(
        "nvfp4", Gemm(_NV, _NV_SQUARE), Gemm(_stochastic(_NV), _NV_SQUARE), Gemm(_stochastic(_NV), _NV, hadamard=16)
    ),
    # BitNet b1.58 (Ma et al. 2024): straight-through estimator for both quantizers
    Recipe("bitnet", Gemm(_INT8, Operand(TERNARY_TENSOR, "absmean")), Gemm(None, FORWARD), Gemm(None, FORWARD)),
)  # fmt: skip
RECIPES: Mapping[str, Recipe] = {r.name: r for r in _ALL}
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
MX = tuple(name for name in RECIPES if name.startswith("mx"))


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name, or the recipe itself. Raises ValueError with the known names."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise ArgumentTypeError(f"a training recipe is a name such as 'rowwise' or a Recipe, got {show(recipe)}")
    if recipe not in RECIPES:
        guess = did_you_mean(recipe, RECIPES)
        raise ValueError(f"unknown training recipe {recipe!r}{guess}; known: {', '.join(RECIPES)}")
    return RECIPES[recipe]
