"""Configs of ``pennyweight.quantize_`` for training: quantized products or quantized trainable weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...core.formats import INT8, Format
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...distributed.dtensor import local_tensor
from ...kernels.target import target_of
from ...planning.configs.base import AnyDtype, AOBaseConfig, as_format
from ...planning.module_handlers import register_quantize_module_handler
from ...support.arguments import check_choice
from .gemm_table import ProductCase, select
from .linear import LowPrecisionLinear, convert_
from .recipes import FLOAT8, HIGH, MX, Operand, Recipe, get_recipe

LEAST = 16  # minimum inputs and outputs: the tile size of matrix units; below, scales cost more than is saved


@dataclass(frozen=True)
class LowPrecisionTrainingConfig(AOBaseConfig):
    """Linear layers train under a recipe, given by name or as an object. Layers with fewer than ``least`` inputs or
    outputs are not converted; the report lists them."""

    recipe: str | Recipe = "rowwise"
    least: int = LEAST

    def __post_init__(self) -> None:
        self.make()

    def make(self) -> Recipe:
        """The recipe."""
        return get_recipe(self.recipe)


@dataclass(frozen=True)
class Float8TrainingConfig(LowPrecisionTrainingConfig):
    """Float8: "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", optionally with another format per operand
    (torch.float8_e5m2, "e4m3")."""

    recipe: str | Recipe = "tensorwise"
    input: AnyDtype | None = None
    weight: AnyDtype | None = None
    grad_output: AnyDtype | None = None

    def make(self) -> Recipe:
        if isinstance(self.recipe, str):
            check_choice("Float8TrainingConfig: recipe", self.recipe, FLOAT8)
        given: list[Format | None] = [
            None if f is None else as_format(f) for f in (self.input, self.weight, self.grad_output)
        ]
        for f in given:
            if f is not None and not (f.native_float and f.bits == 8):
                raise ValueError(f"Float8TrainingConfig: formats are e4m3 and e5m2, got {f}")
        how = get_recipe(self.recipe)
        return how if given == [None, None, None] else how.with_formats(*given)


@dataclass(frozen=True)
class Int8MixedPrecisionTrainingConfig(LowPrecisionTrainingConfig):
    """Each of the three products in int8 with one scale per row, or in high precision if its flag is False.

    Recipe "int8" is torchao's. "int8_hadamard" preserves the small gradients that "int8" loses.
    """

    recipe: str | Recipe = "int8"
    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    module_swap: bool = True  # for compatibility with torchao; ignored

    def make(self) -> Recipe:
        how = get_recipe(self.recipe)
        off = {name: HIGH for name in ("output", "grad_input", "grad_weight") if not getattr(self, name)}
        return how.with_(**off) if off else how


@dataclass(frozen=True)
class MXTrainingConfig(LowPrecisionTrainingConfig):
    """Blocks of 32 with power-of-two scales: "mxfp8", "mxfp8_with_gw_hp", "mxfp8_mxfp4" (4-bit gradients), "mxfp4"."""

    recipe: str | Recipe = "mxfp8"

    def make(self) -> Recipe:
        if isinstance(self.recipe, str):
            check_choice("MXTrainingConfig: recipe", self.recipe, MX)
        return get_recipe(self.recipe)


@dataclass(frozen=True)
class BitNetTrainingConfig(LowPrecisionTrainingConfig):
    """Ternary weights with absmean scale, per-token int8 inputs, straight-through gradients (BitNet b1.58).

    ``pennyweight.quantize_(model, get_recipe("bitnet").deployed())`` then quantizes the trained weights.
    """

    recipe: str | Recipe = "bitnet"


@dataclass(frozen=True)
class Int8WeightOnlyTrainingConfig(AOBaseConfig):
    """Trainable int8 weights without a float copy: 1 byte per weight instead of 4.

    group_size  number of weights per scale; None: one scale per row
    Updates smaller than one code need stochastic rounding: the optimizers of ``pennyweight.optim`` do this, others
    under :func:`pennyweight.training.stochastic_rounding`.
    """

    group_size: int | None = None
    least: int = LEAST

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"Int8WeightOnlyTrainingConfig: group_size must be positive, got {self.group_size}")

    @property
    def spec(self) -> QuantSpec:
        """Spec of the weight."""
        return QuantSpec(INT8, (self.group_size or -1,))


# -- handlers of quantize_ ---------------------------------------------------------------------------------------------


def _why_not(module: nn.Module, least: int) -> str:
    """Reason why a module cannot be converted, or ""."""
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention uses its parameters directly instead of calling layers; use nn.Linear"
    if type(module) not in (nn.Linear, LowPrecisionLinear):
        return f"only nn.Linear is converted; {type(module).__name__} may have its own forward"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a wrapper?); convert it before wrapping"
    weight = local_tensor(module.weight)
    if isinstance(weight, AffineQuantizedTensor):
        return f"its weight is already quantized: {weight.spec}"
    assert isinstance(module, nn.Linear)
    if min(module.in_features, module.out_features) < least:
        return f"fewer than {least} inputs or outputs"
    return ""


def _can_convert(module: nn.Module, config: LowPrecisionTrainingConfig) -> tuple[bool, str]:
    why = _why_not(module, config.least)
    if why or not isinstance(module, nn.Linear):
        return False, why
    how, notes = config.make(), []
    a, b = how.output.a, how.output.b
    if isinstance(a, Operand) and isinstance(b, Operand):
        w = module.weight
        case = ProductCase(a.spec, b.spec, (LEAST, *w.shape), w.dtype, "cpu" if w.is_meta else target_of(w.device))
        notes.append(f"{how.name}, by {select(case).name}")
    else:
        notes.append(how.name)
    padded = _padding(how, module.in_features, module.out_features)
    if padded:
        notes.append(padded)
    if isinstance(module, LowPrecisionLinear):
        notes.append("already converted" if module.recipe == how else f"was {module.recipe.name}")
    if not module.weight.requires_grad:
        notes.append("its weight is frozen")
    return True, "; ".join(notes)


def _padding(how: Recipe, inputs: int, outputs: int) -> str:
    """Describes padding of sizes that are not multiples of the block, or of a GPU's tile."""
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
    """(whether a module's weight can be converted, note or reason)."""
    if type(module) is LowPrecisionLinear:
        return False, f"trains under recipe {module.recipe.name}; to_high_precision_ first"
    why = _why_not(module, config.least)
    return not why, why or f"{config.spec}, trainable"


def _convert(module: nn.Module, config: LowPrecisionTrainingConfig) -> nn.Module:
    return convert_(module, config.make())


def make_trainable(module: nn.Module, config: Int8WeightOnlyTrainingConfig) -> nn.Module:
    """Replace the module's weight by a quantized trainable one; returns the module."""
    old: Any = module.weight
    w = trainable(old, config.spec)
    module.weight = nn.Parameter(w, requires_grad=old.requires_grad)
    return module


def trainable(x: torch.Tensor, spec: QuantSpec) -> AffineQuantizedTensor:
    """x as a trainable quantized tensor: rounded to nearest, with scales that avoid saturation."""
    return AffineQuantizedTensor.from_float(x.detach(), spec, rule="absmax")


for _config in (
    LowPrecisionTrainingConfig, Float8TrainingConfig, Int8MixedPrecisionTrainingConfig, MXTrainingConfig,
    BitNetTrainingConfig,
):  # fmt: skip
    register_quantize_module_handler(_config, tells=_can_convert)(_convert)
register_quantize_module_handler(Int8WeightOnlyTrainingConfig, tells=names_weight)(make_trainable)
