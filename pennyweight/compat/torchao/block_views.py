"""torchao's block-quantized weights with low-bit scales: MXTensor, NVFP4Tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from ...core.numerics import Parts
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from .class_view import View, plain_codes, whole
from .enums import KernelPreference, ScaleCalculationMode
from .int8_float8_views import QuantizeTensorKwargs

__all__ = [
    "MXTensor", "NVFP4Tensor", "QuantizeTensorToMXKwargs", "QuantizeTensorToNVFP4Kwargs",
]  # fmt: skip
_E8M0_SCALE = QuantSpec(E8M0, (1,), scale=None)


# -- MX and NVFP4 ----------------------------------------------------------------------------------------------------

_ELEMENTS: dict[Any, Format] = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2,
    torch.float4_e2m1fn_x2: E2M1,
}  # fmt: skip


_FP4_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)  # two values per byte


@dataclass
class QuantizeTensorToMXKwargs(QuantizeTensorKwargs):
    """An MX activation."""

    elem_dtype: Any = torch.float8_e4m3fn
    block_size: int = 32
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR
    kernel_preference: KernelPreference = KernelPreference.EMULATED
    is_swizzled_scales: bool = False


@dataclass
class QuantizeTensorToNVFP4Kwargs(QuantizeTensorKwargs):
    """An NVFP4 activation."""

    block_size: int = 16
    is_swizzled_scales: bool = False
    use_triton_kernel: bool = False
    use_dynamic_per_tensor_scale: bool = False


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] from the blocks of 128 by 4 (cuBLAS block-scaled layout) that tensor cores read."""
    rb, cb = -(-rows // 128), -(-columns // 4)
    if scale.numel() != rb * cb * 512:
        raise ValueError(f"swizzled scale of {scale.numel()} numbers; {rows} rows of {columns} take {rb * cb * 512}")
    tiles = scale.view(torch.uint8).reshape(rb, cb, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rb * 128, cb * 4)[:rows, :columns].contiguous()


def _need(what: str, part: Tensor, dtypes: tuple[torch.dtype, ...], axes: int = 0) -> None:
    """Raise ValueError unless the part has one of the dtypes, and at least this many axes."""
    if part.dtype not in dtypes or part.ndim < axes:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{what} must be {kinds} of at least {axes} axes, got {part.dtype} {list(part.shape)}")


def _in_blocks(scale: Tensor, counts: tuple[int, ...], block_size: int) -> Tensor:
    """The scale in the shape of its blocks."""
    if scale.numel() != math.prod(counts):
        raise ValueError(f"scale is {list(scale.shape)}; blocks of {block_size} are {list(counts)}")
    return scale.reshape(counts)


def _fp4_codes(qdata: Tensor) -> Tensor:
    """e2m1 codes of bytes, the even element low."""
    packed = qdata.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


class MXTensor(View):
    """OCP MX: blocks of 32 along the last axis under power-of-two scales."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    tensor_attribute_names = [  # noqa: RUF012
        "elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales",
    ]  # fmt: skip

    @staticmethod
    def holds(w: QT) -> bool:
        spec = w.spec
        return (
            spec.scale == _E8M0_SCALE and spec.format in _ELEMENTS.values() and spec.block is not None
            and len(spec.block) == 1 and w.axes is None and whole(w)
            and (w.act is None or w.act.spec.scale == _E8M0_SCALE)
        )  # fmt: skip

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, elem_dtype: Any, block_size: int, orig_dtype: torch.dtype,
        kernel_preference: Any = KernelPreference.EMULATED, act_quant_kwargs: QuantizeTensorToMXKwargs | None = None,
        is_swizzled_scales: bool = False,
    ) -> QT:  # fmt: skip
        if elem_dtype not in _ELEMENTS:
            raise AssertionError(f"elem_dtype must be one of {[str(e) for e in _ELEMENTS]}, got {elem_dtype}")
        fmt = _ELEMENTS[elem_dtype]
        _need("qdata", qdata, _FP4_BYTES if fmt is E2M1 else (fmt.code_dtype,), 1)
        _need("scale", scale, (torch.uint8, torch.float8_e8m0fnu))
        codes = _fp4_codes(qdata) if fmt is E2M1 else qdata
        shape = tuple(codes.shape)
        counts = blocks.counts((block_size,), shape)
        exponents = scale.view(torch.uint8)
        if is_swizzled_scales:
            exponents = unswizzled(scale, codes[..., 0].numel(), counts[-1])
        parts = Parts(codes, Parts(_in_blocks(exponents, counts, block_size)))
        return QT(parts, QuantSpec(fmt, (block_size,), _E8M0_SCALE), shape, orig_dtype,
                  _mx_activation(act_quant_kwargs))  # fmt: skip

    @classmethod
    def to_mx(
        cls, data_hp: Tensor, elem_dtype: Any, block_size: int = 32,
        scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
        kernel_preference: Any = KernelPreference.EMULATED,
        act_quant_kwargs: QuantizeTensorToMXKwargs | None = None, is_swizzled_scales: bool = False, **kwargs: Any,
    ) -> QT:  # fmt: skip
        """Quantize the last axis in blocks. Pennyweight chooses layout and kernel; the related arguments are
        ignored."""
        if data_hp.shape[-1] % block_size:
            raise AssertionError(f"the last axis of {list(data_hp.shape)} is not a multiple of {block_size}")
        spec = QuantSpec(_ELEMENTS[elem_dtype], (block_size,), _E8M0_SCALE)
        return QT.from_float(data_hp, spec, f"mx_{scaling_mode.name.lower()}", act=_mx_activation(act_quant_kwargs))

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        scale = w.scale
        assert isinstance(scale, QT)
        assert w.spec.block is not None
        kwargs = None
        if w.act is not None:
            mode = ScaleCalculationMode[(w.act.rule or "mx_floor").removeprefix("mx_").upper()]
            assert w.act.spec.block is not None
            kwargs = QuantizeTensorToMXKwargs(_element(w.act.spec.format), w.act.spec.block[0], mode)
        return {
            "qdata": _bytes(plain_codes(w), w.spec.format), "scale": scale.codes.view(torch.float8_e8m0fnu),
            "elem_dtype": _element(w.spec.format), "block_size": w.spec.block[0], "orig_dtype": w.dtype,
            "kernel_preference": KernelPreference.EMULATED, "act_quant_kwargs": kwargs, "is_swizzled_scales": False,
        }  # fmt: skip


def _mx_activation(kwargs: QuantizeTensorToMXKwargs | None) -> ActivationSpec | None:
    if kwargs is None:
        return None
    spec = QuantSpec(_ELEMENTS[kwargs.elem_dtype], (kwargs.block_size,), _E8M0_SCALE)
    return ActivationSpec(spec, "dynamic", f"mx_{kwargs.scaling_mode.name.lower()}")


def _element(fmt: Format) -> Any:
    return next(name for name, mine in _ELEMENTS.items() if mine is fmt)


def _bytes(codes: Tensor, fmt: Format) -> Tensor:
    return codes if fmt is not E2M1 else codes[..., ::2] | codes[..., 1::2] << 4


class NVFP4Tensor(View):
    """e2m1 in blocks of 16 with e4m3 scales, and optionally one float32 scale."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["block_size", "orig_dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["per_tensor_scale", "act_per_tensor_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec, scale = w.spec, w.spec.scale
        return (
            spec.format is E2M1 and isinstance(scale, QuantSpec) and scale.format is E4M3 and scale.offset is None
            and scale.block in (None, (1,)) and w.axes is None and w.act is None
            and whole(w)
        )  # fmt: skip

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, block_size: int, orig_dtype: torch.dtype,
        per_tensor_scale: Tensor | None = None, act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False, use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
    ) -> QT:  # fmt: skip
        if act_quant_kwargs is not None or act_per_tensor_scale is not None:
            raise NotImplementedError(
                "NVFP4 activations are not supported yet; use weight-only (act_quant_kwargs=None)"
            )
        _need("qdata", qdata, _FP4_BYTES, 1)
        _need("scale", scale, (torch.float8_e4m3fn,))
        codes = _fp4_codes(qdata)
        shape = tuple(codes.shape)
        counts = blocks.counts((block_size,), shape)
        if is_swizzled_scales:
            scale = unswizzled(scale, codes[..., 0].numel(), counts[-1]).view(torch.float8_e4m3fn)
        inner = Parts(_in_blocks(scale, counts, block_size))
        outer = QuantSpec(E4M3, (1,), scale=None)
        if per_tensor_scale is not None:
            _need("per_tensor_scale", per_tensor_scale, (torch.float32, torch.float16, torch.bfloat16))
            if per_tensor_scale.numel() != 1:
                raise ValueError(f"per_tensor_scale must be one number, got {list(per_tensor_scale.shape)}")
            inner, outer = (
                inner._replace(scale=per_tensor_scale.float().reshape((1,) * len(shape))),
                QuantSpec(E4M3, None),
            )
        return QT(Parts(codes, inner), QuantSpec(E2M1, (block_size,), outer), shape, orig_dtype)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        scale = w.scale
        assert isinstance(scale, QT)
        assert w.spec.block is not None
        whole = scale.scale
        return {
            "qdata": _bytes(plain_codes(w), E2M1), "scale": scale.codes, "block_size": w.spec.block[0],
            "orig_dtype": w.dtype, "per_tensor_scale": None if whole is None else whole.reshape(()),
            "act_per_tensor_scale": None, "is_swizzled_scales": False, "use_triton_kernel": False,
            "act_quant_kwargs": None,
        }  # fmt: skip
