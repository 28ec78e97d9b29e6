"""The stretched grid of ParetoQ, (k + 1/2) s: its scale, its codes, and the config that stores weights on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ....planning.granularity import Granularity, MappingType, PerAxis, PerGroup
from ....planning.module_handlers import register_quantize_module_handler
from ..class_view import ready
from ..config_json import register_config_type
from ..int8_float8_views import IntxUnpackedToInt8Tensor
from ..primitives import VALUE_DTYPES
from ..qparams import _SUB_BYTE_UINT_BOUNDS, block_view, expand_to_groups, require
from ..quant_api import _ExtraRepr

__all__ = ["StretchedIntxWeightConfig", "choose_qparams_stretched_affine", "quantize_stretched_affine"]


def choose_qparams_stretched_affine(
    input_float: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: torch.dtype, b: int,
    quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
    scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(scale, zero point -1/2): scale = max(min(b mean|x|, max|x|), eps) / quant_max of each block.

    quant_max: default 2^(b-1) - 1/2. eps: default that of the dtype. The results have an axis of size one in place of
    the elements of a block, as a matrix of [rows, blocks] has.
    """
    most = 2 ** (b - 1) - 0.5 if quant_max is None else quant_max
    view, inner, _ = block_view(input_float, block_size)
    size = view.abs()
    mean, limit = (size.mean(inner, keepdim=True), size.amax(inner, keepdim=True)) if inner else (size, size)
    limit = torch.minimum(b * mean, limit).clamp_(min=torch.finfo(input_float.dtype).eps if eps is None else eps)
    scale = (limit / most).to(scale_dtype or input_float.dtype)
    return scale, torch.full_like(scale, -0.5, dtype=zero_point_dtype or input_float.dtype)


@torch.no_grad()
def quantize_stretched_affine(
    input_float: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None,
    target_dtype: torch.dtype, quant_min: float | None = None, quant_max: float | None = None,
) -> Tensor:  # fmt: skip
    """Codes round(clamp(x, -m, m) / scale + zero_point), m = scale quant_max, in the shape of the input.

    scale, zero_point: one per block, in any shape. Codes of less than a byte come as uint8. Raises ValueError without
    quant_max, AssertionError for inputs that are not float32, float16 or bfloat16.
    """
    require(input_float.dtype in VALUE_DTYPES, f"Unsupported input_float dtype: {input_float.dtype}")
    if quant_max is None:
        raise ValueError("quantize_stretched_affine needs quant_max, 2**(b - 1) - 0.5 for b bits")
    view, _, shape = block_view(input_float, block_size)
    scale = expand_to_groups(scale, shape, "scale")
    limit = scale * quant_max
    steps = view.clamp(-limit, limit) / scale
    if zero_point is not None and zero_point.numel():
        steps = steps + expand_to_groups(zero_point, shape, "zero_point")
    dtype = torch.uint8 if target_dtype in _SUB_BYTE_UINT_BOUNDS else target_dtype
    return steps.round().to(dtype).reshape(input_float.shape)


@register_config_type
@dataclass(frozen=True)
class StretchedIntxWeightConfig(AOBaseConfig):
    """Weights on the stretched grid, b bits and a scale per output channel or group; int8 activations per token.

    scale_dtype              None: that of the weight
    quant_min, quant_max     None: -+(2^(b-1) - 1/2)
    activation_quantization  "int8_asym_per_token", or None: weights only
    """

    granularity: Granularity = field(default_factory=lambda: PerAxis(0))
    scale_dtype: torch.dtype | None = None
    version: int = 2
    b: int | None = None
    quant_min: float | None = None
    quant_max: float | None = None
    activation_quantization: str | None = "int8_asym_per_token"

    def __post_init__(self) -> None:
        if self.b is not None and not 1 <= self.b <= 8:
            raise ValueError(f"StretchedIntxWeightConfig: b must be 1 to 8 bits, got {self.b}")
        if self.version != 2:
            raise NotImplementedError(f"StretchedIntxWeightConfig: version must be 2, got {self.version}")
        if not isinstance(self.granularity, (PerGroup, PerAxis)) or getattr(self.granularity, "axis", 0) != 0:
            raise ValueError(
                f"StretchedIntxWeightConfig: granularity must be PerAxis(0) or PerGroup(n), got {self.granularity}"
            )


@register_quantize_module_handler(StretchedIntxWeightConfig)
def _on_stretched_grid(module: nn.Module, config: StretchedIntxWeightConfig) -> nn.Module:
    weight: Any = module.weight
    if config.b is None:
        raise ValueError("StretchedIntxWeightConfig: b, the number of bits, must be set")
    if weight.ndim != 2:
        raise ValueError(f"StretchedIntxWeightConfig needs a matrix, the weight is {list(weight.shape)}")
    columns = weight.shape[1]
    group = config.granularity.group_size if isinstance(config.granularity, PerGroup) else columns
    if columns % group:
        raise ValueError(f"StretchedIntxWeightConfig: groups of {group} do not divide {columns} columns")
    most = 2 ** (config.b - 1) - 0.5 if config.quant_max is None else config.quant_max
    with torch.no_grad():
        scale, zero = choose_qparams_stretched_affine(
            weight, MappingType.ASYMMETRIC, (1, group), torch.int8, config.b, -most, most,
            scale_dtype=config.scale_dtype,
        )  # fmt: skip
        codes = quantize_stretched_affine(weight, (1, group), scale, zero, torch.int8, -most, most)
        counts = (weight.shape[0], columns // group)
        new = IntxUnpackedToInt8Tensor(
            codes, scale.reshape(counts), zero.reshape(counts), getattr(torch, f"int{config.b}"), (1, group),
            weight.dtype, config.activation_quantization,
        )  # fmt: skip
    module.weight = nn.Parameter(ready(new), requires_grad=False)
    if type(module) is nn.Linear:
        module.extra_repr = _ExtraRepr(module)  # type: ignore[method-assign]
    return module
