"""Configs of ``pennyweight.quantize_`` for training: what a linear layer's products become, or its weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.distributed.full_tensor import local_tensor
from ...core.formats import INT8, Format
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...quantize.configs.base import AnyDtype, AOBaseConfig, as_format
from ...quantize.module_handlers import register_quantize_module_handler
from .gemm_table import Case, select
from .layer import LowPrecisionLinear, convert_
from .recipes import FLOAT8, HIGH, MX, Operand, Recipe, get_recipe

LEAST = 16  # inputs or outputs: the tile of every matrix unit there is; below it scales outweigh what is saved


@dataclass(frozen=True)
class LowPrecisionTrainingConfig(AOBaseConfig):
    """Linear layers train under a recipe, by name or of one's own. Layers of fewer than ``least`` inputs or outputs are
    left alone, and the report says so."""

    recipe: str | Recipe = "rowwise"
    least: int = LEAST

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> Recipe:
        """The recipe."""
        return get_recipe(self.recipe)


@dataclass(frozen=True)
class Float8TrainingConfig(LowPrecisionTrainingConfig):
    """Float8: "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", with other numbers for an operand if wanted
    (torch.float8_e5m2, "e4m3")."""

    recipe: str | Recipe = "tensorwise"
    input: AnyDtype | None = None
    weight: AnyDtype | None = None
    grad_output: AnyDtype | None = None

    def make(self) -> Recipe:
        if isinstance(self.recipe, str) and self.recipe not in FLOAT8:
            raise ValueError(f"Float8TrainingConfig: recipes are {', '.join(FLOAT8)}, got {self.recipe!r}")
        given: list[Format | None] = [
            None if f is None else as_format(f) for f in (self.input, self.weight, self.grad_output)
        ]
        for f in given:
            if f is not None and not (f.native_float and f.bits == 8):
                raise ValueError(f"Float8TrainingConfig: numbers are e4m3 or e5m2, got {f}")
        how = get_recipe(self.recipe)
        return how if given == [None, None, None] else how.with_formats(*given)


@dataclass(frozen=True)
class Int8MixedPrecisionTrainingConfig(LowPrecisionTrainingConfig):
    """Each of the three products in int8, a scale a row, or in high precision where its flag is False.

    Recipe "int8" is torchao's. "int8_hadamard" keeps the small gradients that it loses.
    """

    recipe: str | Recipe = "int8"
    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    module_swap: bool = True  # torchao's; here there is one way

    def make(self) -> Recipe:
        how = get_recipe(self.recipe)
        off = {name: HIGH for name in ("output", "grad_input", "grad_weight") if not getattr(self, name)}
        return how.with_(**off) if off else how


@dataclass(frozen=True)
class MXTrainingConfig(LowPrecisionTrainingConfig):
    """Blocks of 32 under powers of two: "mxfp8", "mxfp8_with_gw_hp", "mxfp8_mxfp4" (gradients in 4 bits), "mxfp4"."""

    recipe: str | Recipe = "mxfp8"

    def make(self) -> Recipe:
        if isinstance(self.recipe, str) and self.recipe not in MX:
            raise ValueError(f"MXTrainingConfig: recipes are {', '.join(MX)}, got {self.recipe!r}")
        return get_recipe(self.recipe)


@dataclass(frozen=True)
class BitNetTrainingConfig(LowPrecisionTrainingConfig):
    """Ternary weights under their mean, int8 inputs a token, gradients straight through. BitNet b1.58.

    ``pennyweight.quantize_(model, get_recipe("bitnet").deployed())`` then stores what was trained.
    """

    recipe: str | Recipe = "bitnet"


@dataclass(frozen=True)
class Int8WeightOnlyTrainingConfig(AOBaseConfig):
    """Weights that are int8 and nothing else while they train: 1 byte instead of 4, and no float copy of them.

    group_size  weights that share a scale; None: a row
    Steps smaller than a code must be rounded by chance: the optimizers of ``pennyweight.optim`` do, others under
    :func:`pennyweight.training.stochastic_rounding`.
    """

    group_size: int | None = None
    least: int = LEAST

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"Int8WeightOnlyTrainingConfig: group_size must be positive, got {self.group_size}")

    @property
    def spec(self) -> QuantSpec:
        """Of the weight."""
        return QuantSpec(INT8, (self.group_size or -1,))


# -- what quantize_ does with them -------------------------------------------------------------------------------------


def _why_not(module: nn.Module, least: int) -> str:
    """The reason why a module is none that can be converted, or ""."""
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies with its parameters itself, no layer of it is called; use nn.Linear"
    if type(module) not in (nn.Linear, LowPrecisionLinear):
        return f"only nn.Linear is converted; {type(module).__name__} may have a forward of its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a wrapper?); convert it before"
    weight = local_tensor(module.weight)
    if isinstance(weight, AffineQuantizedTensor):
        return f"its weight is quantized already: {weight.spec}"
    assert isinstance(module, nn.Linear)
    if min(module.in_features, module.out_features) < least:
        return f"fewer than {least} inputs or outputs"
    return ""


def _tells_recipe(module: nn.Module, config: LowPrecisionTrainingConfig) -> tuple[bool, str]:
    why = _why_not(module, config.least)
    if why or not isinstance(module, nn.Linear):
        return False, why
    how, notes = config.make(), []
    a, b = how.output.a, how.output.b
    if isinstance(a, Operand) and isinstance(b, Operand):
        w = module.weight
        case = Case(a.spec, b.spec, (LEAST, *w.shape), w.dtype, "cpu" if w.is_meta else w.device.type)
        notes.append(f"{how.name}, by {select(case).name}")
    else:
        notes.append(how.name)
    padded = _padding(how, module.in_features, module.out_features)
    if padded:
        notes.append(padded)
    if isinstance(module, LowPrecisionLinear):
        notes.append("already so" if module.recipe == how else f"was {module.recipe.name}")
    if not module.weight.requires_grad:
        notes.append("its weight is frozen")
    return True, "; ".join(notes)


def _padding(how: Recipe, inputs: int, outputs: int) -> str:
    """What is padded where a size is not whole blocks, or whole tiles of a GPU's units."""
    found = []
    for what, n, gemm in (("inputs", inputs, how.output), ("outputs", outputs, how.grad_input)):
        whole = max([_multiple(s) for s in (gemm.a, gemm.b) if isinstance(s, Operand)] + [gemm.hadamard, 1])
        if n % whole:
            found.append(f"{n} {what} padded to {n + -n % whole}")
        elif gemm.quantized and n % 16:
            found.append(f"{n} {what} padded to {n + -n % 16} on a GPU")
    return ", ".join(found)


def _multiple(side: Operand) -> int:
    block = side.spec.block
    return 1 if block is None or block[-1] == -1 else block[-1]


def names_weight(module: nn.Module, config: Int8WeightOnlyTrainingConfig) -> tuple[bool, str]:
    """Whether a module's weight can be made such, and a note, or why not."""
    if type(module) is LowPrecisionLinear:
        return False, f"trains under recipe {module.recipe.name}; to_high_precision_ first"
    why = _why_not(module, config.least)
    return not why, why or f"{config.spec}, trainable"


def _convert(module: nn.Module, config: LowPrecisionTrainingConfig) -> nn.Module:
    return convert_(module, config.make())


def make_trainable(module: nn.Module, config: Int8WeightOnlyTrainingConfig) -> nn.Module:
    """The module with a weight that is quantized and trained."""
    old: Any = module.weight
    w = trainable(old, config.spec)
    module.weight = nn.Parameter(w, requires_grad=old.requires_grad)
    return module


def trainable(x: torch.Tensor, spec: QuantSpec) -> AffineQuantizedTensor:
    """x as a quantized tensor that can be trained: rounded to the nearest under scales that let nothing saturate."""
    return AffineQuantizedTensor.from_float(x.detach(), spec, rule="absmax")


for _config in (
    LowPrecisionTrainingConfig, Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig,
    BitNetTrainingConfig,
):  # fmt: skip
    register_quantize_module_handler(_config, tells=_tells_recipe)(_convert)
register_quantize_module_handler(Int8WeightOnlyTrainingConfig, tells=names_weight)(make_trainable)

__all__ = [
    "BitNetTrainingConfig", "Float8TrainingConfig", "Int8MixedPrecisionTrainingConfig",
    "Int8WeightOnlyTrainingConfig", "LowPrecisionTrainingConfig", "MXTrainingConfig",
]  # fmt: skip
