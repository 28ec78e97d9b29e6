"""torchao.prototype.quantization.gguf: the class of GGUF's Q4_K weights, as a view of our tensor.

    x = code * quantized_block_scale * super_block_scale_scale + quantized_block_min * super_block_min_scale

Our tensor has these numbers as a scale and an offset that are themselves quantized, 6-bit codes under one scale per
super-block of 256. ``pennyweight.convert(.., to="gguf")`` writes files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....core.formats import UINT4, get_format
from ....core.numerics import Parts
from ....core.spec import QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ..class_view import View, plain_codes, ready
from ..format_primitives import _GGUF_QK_K, _choose_qparams_gguf, _quantize_gguf

__all__ = ["GGUFQuantizedTensor", "GGUFWeightOnlyConfig"]

UINT6 = get_format("uint6")


class GGUFQuantizedTensor(View):
    """uint4 codes in blocks of 256 / n_blocks_per_superblock columns."""

    tensor_data_names = [  # noqa: RUF012
        "super_block_scale_scale", "super_block_min_scale", "quantized_block_scale", "quantized_block_min", "int_data",
    ]  # fmt: skip
    tensor_attribute_names = ["n_blocks_per_superblock", "dtype", "shape"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec, scale, offset = w.spec, w.spec.scale, w.spec.offset
        nested = isinstance(scale, QuantSpec) and scale.format is UINT6 and scale == offset
        return nested and spec.format is UINT4 and w.act is None and w.ndim == 2 and w.shape[1] % _GGUF_QK_K == 0

    @classmethod
    def build(
        cls, n_blocks_per_superblock: int, super_block_scale_scale: Tensor, super_block_min_scale: Tensor,
        quantized_block_scale: Tensor, quantized_block_min: Tensor, int_data: Tensor, shape: Any, **kwargs: Any,
    ) -> QT:  # fmt: skip
        """Super-block scales [N, K / 256]; 6-bit numbers [N, K / 256, n_blocks]; codes [N, K]. kwargs: dtype."""
        n, k = shape
        if k % _GGUF_QK_K or _GGUF_QK_K % n_blocks_per_superblock:
            raise ValueError(
                f"GGUFQuantizedTensor: {k} columns, super-blocks of {_GGUF_QK_K} of {n_blocks_per_superblock} blocks; "
                "the columns must be a multiple of 256, and the blocks must divide it"
            )
        kept = super_block_scale_scale.dtype
        six = QuantSpec(UINT6, (n_blocks_per_superblock,), scale=kept)
        counts = (n, k // _GGUF_QK_K * n_blocks_per_superblock)

        def nested(codes: Tensor, scale: Tensor) -> Parts:
            return Parts(codes.reshape(counts).to(torch.uint8), scale.reshape(n, -1).to(kept))

        parts = Parts(
            int_data.reshape(n, k).to(torch.uint8), nested(quantized_block_scale, super_block_scale_scale), None,
            nested(quantized_block_min, super_block_min_scale),
        )  # fmt: skip
        spec = QuantSpec(UINT4, (_GGUF_QK_K // n_blocks_per_superblock,), scale=six, offset=six)
        return QT(parts, spec, (n, k), kwargs.get("dtype") or kept)

    @classmethod
    def from_float(cls, input_float: Tensor, n_blocks_per_superblock: int, target_dtype: torch.dtype) -> QT:
        """The numbers of ``_choose_qparams_gguf`` and ``_quantize_gguf``. Raises AssertionError unless torch.uint4."""
        assert target_dtype is torch.uint4, f"only uint4 quantization is supported right now, got {target_dtype}"
        x, block = input_float.detach(), (1, _GGUF_QK_K // n_blocks_per_superblock)
        params = _choose_qparams_gguf(x, block, target_dtype)
        codes = _quantize_gguf(x, block, target_dtype, *params)
        return ready(cls.build(n_blocks_per_superblock, *params, codes, x.shape, dtype=x.dtype))

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        parts = w.plain_parts()
        (n, k), per_super = w.shape, _GGUF_QK_K // w.spec.block[-1]  # type: ignore[index]
        shape = (n, per_super) if k == _GGUF_QK_K else (n, k // _GGUF_QK_K, per_super)
        supers = shape[:-1] if k > _GGUF_QK_K else (n,)
        return {
            "super_block_scale_scale": parts.scale.scale.reshape(supers),
            "super_block_min_scale": parts.offset.scale.reshape(supers),
            "quantized_block_scale": parts.scale.codes.reshape(shape),
            "quantized_block_min": parts.offset.codes.reshape(shape), "int_data": plain_codes(w),
            "n_blocks_per_superblock": per_super, "dtype": w.dtype, "shape": w.shape,
        }  # fmt: skip


@dataclass
class GGUFWeightOnlyConfig(AOBaseConfig):
    """Q4_K's numbers: ``dtype`` torch.uint4, blocks of 256 / n_blocks_per_superblock columns."""

    dtype: Any = torch.uint4
    n_blocks_per_superblock: int = 8

    def __post_init__(self) -> None:
        if self.n_blocks_per_superblock < 1 or _GGUF_QK_K % self.n_blocks_per_superblock:
            raise ValueError(f"n_blocks_per_superblock must divide {_GGUF_QK_K}, got {self.n_blocks_per_superblock}")


@register_quantize_module_handler(GGUFWeightOnlyConfig)
def _gguf_weight_only_transform(module: nn.Module, config: GGUFWeightOnlyConfig) -> nn.Module:
    made = GGUFQuantizedTensor.from_float(module.weight, config.n_blocks_per_superblock, config.dtype)  # type: ignore[arg-type]
    module.weight = nn.Parameter(made, requires_grad=False)
    return module
