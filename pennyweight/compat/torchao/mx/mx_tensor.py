"""MXTensor: torchao's OCP MX tensor as a view of ours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import E2M1, E2M3, E3M2, E8M0, Format
from ....core.numerics import Parts
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ..class_view import View, plain_codes, whole
from ..enums import KernelPreference, ScaleCalculationMode
from ..int8_float8_views import QuantizeTensorKwargs
from .constants import BLOCK_SIZE_DEFAULT, ELEMENTS, SUPPORTED_ELEM_DTYPES, element
from .conversion import to_mx
from .custom_cast import swap_halves
from .element_codes import pack_uint4, unpack_uint4, unpack_uint6
from .scale_layout import from_blocked

__all__ = ["FromMXConstrFunc", "MXTensor", "QuantizeTensorToMXKwargs", "ToMXConstrFunc"]
E8M0_SCALE = QuantSpec(E8M0, (1,), scale=None)
FP4_BYTES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)  # two values per byte


@dataclass
class QuantizeTensorToMXKwargs(QuantizeTensorKwargs):
    """An MX activation."""

    elem_dtype: Any = torch.float8_e4m3fn
    block_size: int = BLOCK_SIZE_DEFAULT
    scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR
    kernel_preference: KernelPreference = KernelPreference.EMULATED
    is_swizzled_scales: bool = False

    def spec(self) -> ActivationSpec:
        """Our spec of this activation."""
        spec = QuantSpec(element(self.elem_dtype), (self.block_size,), E8M0_SCALE)
        return ActivationSpec(spec, "dynamic", f"mx_{self.scaling_mode.value}")


def need(what: str, part: Tensor, dtypes: tuple[torch.dtype, ...], axes: int = 0) -> None:
    """Raise ValueError unless the part has one of the dtypes, and at least this many axes."""
    if part.dtype not in dtypes or part.ndim < axes:
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{what} must be {kinds} of at least {axes} axes, got {part.dtype} {list(part.shape)}")


def transposed(qdata: Tensor) -> bool:
    """Whether the last two axes are exchanged in memory, as in the pieces of a transposed tensor."""
    return qdata.ndim > 1 and qdata.stride(-2) < qdata.stride(-1)


def block_scales(scale: Tensor, shape: tuple[int, ...], block_size: int, *, swizzled: bool) -> Tensor:
    """The scales, one byte each, in the shape of their blocks. Raises ValueError for another number of them."""
    counts = blocks.counts((block_size,), shape)
    if swizzled:
        raw = from_blocked(scale.reshape(-1).view(torch.uint8), math.prod(shape[:-1]), counts[-1])
        scale = raw.contiguous().view(scale.dtype)
    if scale.numel() != math.prod(counts):
        raise ValueError(f"scale is {list(scale.shape)}; blocks of {block_size} are {list(counts)}")
    return scale.reshape(counts)


def fp4_codes(qdata: Tensor) -> Tensor:
    """e2m1 codes of bytes, the even element low."""
    return unpack_uint4(qdata.view(torch.uint8))


def element_of(fmt: Format) -> Any:
    """torchao's element dtype of one of our formats."""
    return next(e for e in SUPPORTED_ELEM_DTYPES if ELEMENTS[e] is fmt)


def stored_order(w: QT) -> QT:
    """w with its logical axes in stored order: the contracted one last."""
    return w if w.axes is None else w.with_(axes=None, shape=w.stored_shape)


def logical(w: QT, pieces: dict[str, Any], *names: str) -> dict[str, Any]:
    """Pieces of :func:`stored_order` of w, the named ones with w's order of axes."""
    if w.axes is None:
        return pieces
    return {**pieces, **{name: pieces[name].permute(w.axes) for name in names}}


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
            spec.scale == E8M0_SCALE and spec.format in ELEMENTS.values() and spec.block is not None
            and len(spec.block) == 1 and whole(w)
            and (w.act is None or w.act.spec.scale == E8M0_SCALE)
        )  # fmt: skip

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, elem_dtype: Any, block_size: int, orig_dtype: torch.dtype,
        kernel_preference: Any = KernelPreference.EMULATED, act_quant_kwargs: QuantizeTensorToMXKwargs | None = None,
        is_swizzled_scales: bool = False,
    ) -> QT:  # fmt: skip
        """Transposed pieces (of ``w.t()``) make a transposed tensor. The kernel preference has no effect."""
        fmt = element(elem_dtype)
        need("qdata", qdata, FP4_BYTES if fmt is E2M1 else (fmt.code_dtype,), 1)
        need("scale", scale, (torch.uint8, torch.float8_e8m0fnu))
        if transposed(qdata):
            scale = scale if is_swizzled_scales and scale.ndim < 2 else scale.transpose(-2, -1)
            pieces = (qdata.transpose(-2, -1), scale, elem_dtype, block_size, orig_dtype)
            upright = cls.build(*pieces, kernel_preference, act_quant_kwargs, is_swizzled_scales)
            return upright.transpose(-2, -1)  # type: ignore[return-value]
        codes = fp4_codes(qdata) if fmt is E2M1 else qdata
        shape = tuple(codes.shape)
        exponents = block_scales(scale.view(torch.uint8), shape, block_size, swizzled=is_swizzled_scales)
        act = None if act_quant_kwargs is None else act_quant_kwargs.spec()
        return QT(Parts(codes, Parts(exponents)), QuantSpec(fmt, (block_size,), E8M0_SCALE), shape, orig_dtype, act)

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        """Also of a pickle by torchao before 0.13."""
        if "qdata" in state:
            return super().restore(state, shell)
        codes, fmt = state["_data"], element(state["_elem_dtype"])
        if state.get("_pack_fp6") and fmt in (E2M3, E3M2):
            by_block = unpack_uint6(codes.reshape(-1, state["_block_size"] // 4 * 3))
            codes = by_block.reshape(*codes.shape[:-1], codes.shape[-1] // 3 * 4)
        codes = swap_halves(codes) if fmt is E2M1 else codes
        return cls.build(codes, state["_scale_e8m0"], state["_elem_dtype"], state["_block_size"], state["_orig_dtype"])

    @classmethod
    def from_qdata_and_scales(
        cls, qdata: Tensor, scales: Tensor, orig_dtype: torch.dtype, *, block_size: int = BLOCK_SIZE_DEFAULT,
        kernel_preference: Any = None, act_quant_kwargs: QuantizeTensorToMXKwargs | None = None,
        is_swizzled_scales: bool = False,
    ) -> QT:  # fmt: skip
        """A tensor of codes whose dtype names the element. Raises AssertionError for bytes, which do not."""
        if qdata.dtype is torch.uint8:
            raise AssertionError(
                "qdata must have the dtype of its elements; for bytes call MXTensor(qdata, scale, ...)"
            )
        return cls.build(
            qdata, scales, qdata.dtype, block_size, orig_dtype, kernel_preference, act_quant_kwargs, is_swizzled_scales
        )

    @classmethod
    def to_mx(
        cls, data_hp: Tensor, elem_dtype: Any, block_size: int = BLOCK_SIZE_DEFAULT,
        scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
        kernel_preference: Any = KernelPreference.EMULATED,
        act_quant_kwargs: QuantizeTensorToMXKwargs | None = None, is_swizzled_scales: bool = False, **kwargs: Any,
    ) -> QT:  # fmt: skip
        """The data quantized along its last axis, by :func:`.conversion.to_mx`.

        The kernel table chooses layout and kernel, and scales are kept in the order of the elements: the arguments for
        them are ignored. So are ``gemm_kernel_choice`` and the like of older releases; others raise TypeError.
        """
        unknown = kwargs.keys() - _IGNORED
        if unknown:
            raise TypeError(f"MXTensor.to_mx got unknown arguments {sorted(unknown)}")
        scale, codes = to_mx(data_hp.detach(), elem_dtype, block_size, scaling_mode)
        return cls.build(codes, scale, elem_dtype, block_size, data_hp.dtype, kernel_preference, act_quant_kwargs)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        upright = stored_order(w)
        scale, spec, kwargs = upright._plain("scale"), w.spec, None
        assert spec.block is not None
        if w.act is not None:
            mode = ScaleCalculationMode((w.act.rule or "mx_floor").removeprefix("mx_"))
            assert w.act.spec.block is not None
            kwargs = QuantizeTensorToMXKwargs(element_of(w.act.spec.format), w.act.spec.block[0], mode)
        codes = plain_codes(upright)
        pieces = {
            "qdata": pack_uint4(codes) if spec.format is E2M1 else codes,
            "scale": scale.codes.view(torch.float8_e8m0fnu), "elem_dtype": element_of(spec.format),
            "block_size": spec.block[0], "orig_dtype": w.dtype, "kernel_preference": KernelPreference.EMULATED,
            "act_quant_kwargs": kwargs, "is_swizzled_scales": False,
        }  # fmt: skip
        return logical(w, pieces, "qdata", "scale")


# Arguments of to_mx that select a kernel, or how fp6 is packed
_IGNORED = {
    "gemm_kernel_choice", "mxfp8_dim0_cast_kernel_choice", "pack_fp6", "use_fp4_custom_triton_dequant_kernel",
}  # fmt: skip


# -- functions of torchao's own modules --------------------------------------------------------------------------------


def _addmm_mx_dispatch(a: Tensor, b: Tensor, aten_op: Any = None, bias: Tensor | None = None) -> Tensor:
    """a @ b + bias of matrices of which one or both are quantized. A float ``a`` is quantized as b says."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _to_mxfp8_dim1_kernel_wrapper(
    a: Tensor, block_size: int, elem_dtype: Any, hp_dtype: torch.dtype, kernel_preference: Any = None,
    cast_kernel_choice: Any = None, scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
) -> QT:  # fmt: skip
    """The transpose of a matrix, quantized along its columns, in ``hp_dtype``. Kernel choices have no effect."""
    made = MXTensor.to_mx(a.t().contiguous(), elem_dtype, block_size, scale_calculation_mode)
    return made.to(hp_dtype)  # type: ignore[return-value]


# -- casts of torchao 0.9 ----------------------------------------------------------------------------------------------


class ToMXConstrFunc(torch.autograd.Function):
    """``apply(data, elem_dtype, block_size, scaling_mode, ...)``: MXTensor.to_mx with a straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any, data_hp: Tensor, elem_dtype: Any, block_size: int, scaling_mode: ScaleCalculationMode,
        use_fp4_custom_triton_dequant_kernel: bool = False, gemm_kernel_choice: Any = None,
    ) -> Tensor:  # fmt: skip
        return MXTensor.to_mx(data_hp, elem_dtype, block_size, scaling_mode)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return g, None, None, None, None, None


class FromMXConstrFunc(torch.autograd.Function):
    """``apply(tensor, dtype)``: dequantize with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, tensor_lp: QT, target_dtype: torch.dtype) -> Tensor:
        return tensor_lp.dequantize(target_dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, None]:
        return g, None
