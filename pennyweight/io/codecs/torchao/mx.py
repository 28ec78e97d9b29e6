"""torchao's MXTensor as stored: OCP MX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, Format
from ....core.numerics import Parts
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from .enums import KernelPreference, ScaleCalculationMode
from .int8_float8 import QuantizeTensorKwargs
from .tensor_class import View, plain_codes, whole

# -- elements ----------------------------------------------------------------------------------------------------------

DTYPE_FP4 = "fp4_e2m1"  # of torch before 2.8; torch.float4_e2m1fn_x2 since
DTYPE_FP6_E3M2 = "fp6_e3m2"
DTYPE_FP6_E2M3 = "fp6_e2m3"

SUPPORTED_ELEM_DTYPES: list[Any] = [
    torch.float8_e4m3fn, torch.float8_e5m2, DTYPE_FP6_E2M3, DTYPE_FP6_E3M2, torch.float4_e2m1fn_x2,
]  # fmt: skip
DTYPE_TO_SHORT_STR: dict[Any, str] = {
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", DTYPE_FP6_E2M3: "f6e2m3", DTYPE_FP6_E3M2: "f6e3m2",
    DTYPE_FP4: "f4e2m1", torch.float4_e2m1fn_x2: "f4e2m1",
}  # fmt: skip
ELEMENTS: dict[Any, Format] = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, DTYPE_FP6_E2M3: E2M3, DTYPE_FP6_E3M2: E3M2,
    torch.float4_e2m1fn_x2: E2M1, DTYPE_FP4: E2M1,
}  # fmt: skip


def element(elem_dtype: Any) -> Format:
    """Our format of a torchao element. Raises AssertionError for another value, as torchao does."""
    if not isinstance(elem_dtype, (str, torch.dtype)) or elem_dtype not in ELEMENTS:
        known = ", ".join(str(e).removeprefix("torch.") for e in SUPPORTED_ELEM_DTYPES)
        raise AssertionError(f"elem_dtype must be one of {known}, got {elem_dtype}")
    return ELEMENTS[elem_dtype]


# -- packed codes and scales -------------------------------------------------------------------------------------------


def pack_uint4(uint8_data: Tensor) -> Tensor:
    """Two codes in a byte, the even element in the low half: [.., n] -> [.., n / 2]. Raises ValueError for odd n."""
    if uint8_data.shape[-1] % 2:
        raise ValueError(f"{list(uint8_data.shape)}: two codes fill a byte, so the last axis must be even")
    return uint8_data[..., ::2] | uint8_data[..., 1::2] << 4


def unpack_uint4(uint8_data: Tensor) -> Tensor:
    """Inverse of :func:`pack_uint4`; the result is contiguous."""
    return torch.stack([uint8_data & 0xF, uint8_data >> 4], -1).flatten(-2)


def unpack_uint6(packed: Tensor) -> Tensor:
    """Codes of six bits, four in three bytes. packed: [.., 3 n / 4], one block; returns [.., n]."""
    first, second, low = packed.chunk(3, -1)
    high = (first >> 4, first & 0xF, second >> 4, second & 0xF)
    return torch.stack([h << 2 | low >> shift & 3 for h, shift in zip(high, (6, 4, 2, 0), strict=True)], -1).flatten(-2)


def swap_halves(packed: Tensor) -> Tensor:
    """Bytes of two codes, of releases before 0.12, in the order of later ones."""
    return packed << 4 | packed >> 4


def from_blocked(blocked_tensor: Tensor, original_rows: int, original_cols: int) -> Tensor:
    """Block scales [rows, columns] from the order of tensor cores: tiles of 128 x 4, each stored as 32 rows of 16.

    Raises ValueError unless the tensor has the tiles of that size.
    """
    high, wide = -(-original_rows // 128), -(-original_cols // 4)
    if blocked_tensor.numel() != high * wide * 512:
        raise ValueError(
            f"swizzled scale of {blocked_tensor.numel()} numbers; {original_rows} rows of {original_cols} take "
            f"{high * wide * 512}"
        )
    tiles = blocked_tensor.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * 128, wide * 4)[:original_rows, :original_cols]


BLOCK_SIZE_DEFAULT = 32
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
