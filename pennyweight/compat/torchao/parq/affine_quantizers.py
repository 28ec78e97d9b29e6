"""Quantizers on the grids of torchao's configs, so that training ends on values that the config converts unchanged."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....planning.granularity import MappingType
from ..enums import ZeroPointDomain
from ..primitives import (
    _dequantize_affine_no_zero_point,
    _dequantize_affine_tinygemm,
    _quantize_affine_no_zero_point,
    _quantize_affine_tinygemm,
    dequantize_affine,
    quantize_affine,
)
from ..qparams import (
    _DTYPE_TO_QVALUE_BOUNDS,
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    choose_qparams_affine,
)
from .quantizers import Quantizer
from .stretched_grid import choose_qparams_stretched_affine, quantize_stretched_affine

__all__ = ["Int4UnifTorchaoQuantizer", "StretchedUnifTorchaoQuantizer", "UnifTorchaoQuantizer"]


class UnifTorchaoQuantizer(Quantizer):
    """Affine quantization as ``choose_qparams_affine``, ``quantize_affine`` and ``dequantize_affine`` do it.

    quant_min, quant_max  range of the codes; None: that of a signed integer with the ``b`` bits of each call
    eps                   smallest scale; None: the smallest normal number of the weight's dtype
    zero_point_domain     NONE with preserve_zero=False: no zero point. For ASYMMETRIC with preserve_zero=False, FLOAT:
                          tinygemm's numbers; INT: a range that need not include zero
    """

    def __init__(
        self, mapping_type: MappingType = MappingType.SYMMETRIC, target_dtype: torch.dtype = torch.int8,
        quant_min: float | None = None, quant_max: float | None = None, eps: float | None = None,
        preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    ) -> None:  # fmt: skip
        super().__init__(center=False)
        self.mapping_type, self.target_dtype = mapping_type, target_dtype
        self.quant_min, self.quant_max, self.eps = quant_min, quant_max, eps
        self._choose_qparams: Any = choose_qparams_affine
        self._quantize: Any = quantize_affine
        self._dequantize: Any = dequantize_affine
        if preserve_zero:
            return
        if zero_point_domain == ZeroPointDomain.NONE:
            self._quantize, self._dequantize = _quantize_affine_no_zero_point, _dequantize_affine_no_zero_point
        elif mapping_type == MappingType.ASYMMETRIC and zero_point_domain == ZeroPointDomain.FLOAT:
            self._choose_qparams = _choose_qparams_affine_tinygemm
            self._quantize, self._dequantize = _quantize_affine_tinygemm, _dequantize_affine_tinygemm
        elif mapping_type == MappingType.ASYMMETRIC and zero_point_domain == ZeroPointDomain.INT:
            self._choose_qparams = _choose_qparams_affine_dont_preserve_zero

    def _range(self, b: int) -> tuple[float, float]:
        if self.quant_min is not None and self.quant_max is not None:
            return self.quant_min, self.quant_max
        if not 1 <= b <= 8:
            raise ValueError(f"{type(self).__name__}: quant_bits must be 1 to 8, got {b}; or set quant_min, quant_max")
        return _DTYPE_TO_QVALUE_BOUNDS[getattr(torch, f"int{b}")]

    def get_quant_size(self, b: int) -> int:
        """quant_max - quant_min + 1."""
        low, high = self._range(b)
        return int(high - low) + 1

    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Rows of p are blocks with a scale each; without ``dim`` the tensor is one block."""
        low, high = self._range(b)
        bounds = {"quant_min": low, "quant_max": high}
        eps = torch.finfo(p.dtype).smallest_normal if self.eps is None else self.eps
        block = (1, p.shape[-1]) if dim is not None else tuple(p.shape)
        scale, zero = self._choose_qparams(
            p, self.mapping_type, block, self.target_dtype, eps=eps, **bounds, **self._more
        )
        if self._dequantize is _dequantize_affine_no_zero_point:
            zero = None
        out = {"output_dtype": p.dtype, **bounds}
        codes = self._quantize(p, block, scale, zero, self.target_dtype, **bounds)
        q = self._dequantize(codes, block, scale, zero, self.target_dtype, **out)
        numbers = torch.arange(low, high + 1e-5, device=p.device).floor().to(self.target_dtype)
        if dim is not None:
            numbers = numbers.expand(len(q), -1)
        shape = (1, numbers.shape[-1]) if dim is not None else tuple(numbers.shape)
        return q, self._dequantize(numbers, shape, scale, zero, self.target_dtype, **out)

    _more: dict[str, Any] = {}  # noqa: RUF012 - further arguments of _choose_qparams


class StretchedUnifTorchaoQuantizer(UnifTorchaoQuantizer):
    """Values (k + 1/2) s: 2^b of them, symmetric and without zero (ParetoQ). s = min(b mean|p|, max|p|) / quant_max.

    quant_max = 2^(b-1) - int_shift
    """

    def __init__(self, b: int, int_shift: float = 0.5, **kwargs: Any) -> None:
        most = 2 ** (b - 1) - int_shift
        super().__init__(mapping_type=MappingType.ASYMMETRIC, quant_min=-most, quant_max=most, **kwargs)
        self.int_shift = int_shift
        self._choose_qparams, self._quantize, self._more = (
            choose_qparams_stretched_affine, quantize_stretched_affine, {"b": b},
        )  # fmt: skip

    def get_quant_size(self, b: int) -> int:
        """Numbers between quant_min and quant_max in steps of one."""
        return math.floor(2**b - 2 * self.int_shift) + 1


class Int4UnifTorchaoQuantizer(UnifTorchaoQuantizer):
    """The values of Int4WeightOnlyConfig: codes 0 to 15 and a real offset."""

    def __init__(self) -> None:
        super().__init__(
            MappingType.ASYMMETRIC, torch.int32, 0, 15, 1e-6, preserve_zero=False,
            zero_point_domain=ZeroPointDomain.FLOAT,
        )  # fmt: skip
