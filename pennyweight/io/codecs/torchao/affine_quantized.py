"""torchao's AffineQuantizedTensor (0.8 to 0.17) as pickled: with its tensor impl, layout and activation quantization.

Layouts and impls are only read: instances of the classes here hold the attributes of pickled ones until their tensor is
built. Packed codes: UintxTensor's shards of 4, 2 and 1 bits. A shard of e bits splits the packed axis into 8 / e
consecutive chunks and stores chunk j at bit e * j of its bytes. The lowest bits of the codes are the first shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.formats import INT8
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs.integer import INT8_EPS
from .enums import ZeroPointDomain
from .int4 import packed_by_aten
from .tensor_class import FLOAT8, Shell, View, float_codes, int_codes


class _Layout:
    """The attributes of a pickled layout."""


class _Impl(Shell):
    """The attributes of a pickled tensor impl."""


def _classes(base: type, names: str) -> dict[str, type]:
    return {
        name: type(base)(name, (base,), {"__module__": __name__, "__doc__": base.__doc__}) for name in names.split()
    }


LAYOUTS = _classes(_Layout, "Float8Layout Int4CPULayout PlainLayout QDQLayout TensorCoreTiledLayout UintxLayout")
IMPLS = _classes(
    _Impl,
    "Float8AQTTensorImpl Int4CPUAQTTensorImpl PlainAQTTensorImpl QDQTensorImpl TensorCoreTiledAQTTensorImpl "
    "UintxAQTTensorImpl",
)

# -- codes -------------------------------------------------------------------------------------------------------------

numbits = {bits: tuple(e for e in (4, 2, 1) if bits & e) for bits in range(1, 8)}  # width of each shard
shifts = {bits: tuple(sum(widths[:i]) for i in range(len(widths))) for bits, widths in numbits.items()}


def unpack(data: Sequence[Tensor], elem_size: int, dim: int = 0) -> Tensor:
    """Codes of shards: uint8. Raises AssertionError for another number of shards than ``elem_size`` bits have."""
    if len(data) != len(numbits[elem_size]):
        raise AssertionError(f"{elem_size}-bit codes have {len(numbits[elem_size])} shards, got {len(data)}")
    codes: Tensor | None = None
    for shard, e, shift in zip(data, numbits[elem_size], shifts[elem_size], strict=True):
        bits = torch.cat([(shard >> (e * j)) & ((1 << e) - 1) for j in range(8 // e)], dim) << shift
        codes = bits if codes is None else codes | bits
    assert codes is not None
    return codes


class UintxTensor(Shell):
    """Unsigned integers of 1 to 7 bits in shards. Calls return the codes as a plain uint8 tensor."""

    @classmethod
    def build(cls, shards: list[Tensor], packed_shape: Any, bit_width: int, pack_dim: int = -1) -> Tensor:
        return unpack(shards, bit_width, pack_dim)

    def codes(self) -> Tensor:
        """Codes of an unpickled tensor, one per element."""
        held = self.__dict__
        shards = [held[f"int{bits}_shard"] for bits in (4, 2, 1) if held.get(f"int{bits}_shard") is not None]
        return unpack(shards, held["bit_width"], held["pack_dim"])


_RANGES = {dtype: torch.iinfo(dtype) for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)}


def code_range(dtype: torch.dtype, low: float | None, high: float | None) -> tuple[int, int]:
    """The least and the greatest code, by default those of ``dtype``. Raises ValueError for a dtype without codes,
    AssertionError for bounds outside its range."""
    if dtype not in _RANGES:
        raise ValueError(f"Unsupported dtype: {dtype}; codes are integers of at most 32 bits or float8")
    info = _RANGES[dtype]
    lo, hi = info.min if low is None else int(low), info.max if high is None else int(high)
    if lo < info.min or hi > info.max:
        raise AssertionError(f"codes from {lo} to {hi} are out of bound for dtype {dtype}")
    return lo, hi


def full_rank(scale: Tensor, x: Tensor) -> Tensor:
    """A scale with missing trailing axes, as stored by these releases, with one axis for each of x."""
    if scale.ndim == x.ndim or scale.numel() == 1:
        return scale
    return scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))


def weight_of(
    data: Tensor, scale: Tensor, zero: Tensor | None, block_size: Sequence[int], shape: Sequence[int],
    quant_min: float | None, quant_max: float | None, domain: ZeroPointDomain, dtype: torch.dtype,
) -> QT:  # fmt: skip
    """The weight of plain codes [.., K], one scale per block, and zero points as ``domain`` says."""
    if data.dtype in FLOAT8:
        return float_codes(data, full_rank(scale, data), FLOAT8[data.dtype], tuple(block_size), dtype)
    lo, hi = code_range(data.dtype, quant_min, quant_max)
    zero = None if domain is ZeroPointDomain.NONE else zero
    w = int_codes(data, scale, zero, block_size, dtype, lo, hi, real=domain is ZeroPointDomain.FLOAT)
    return w.with_(shape=tuple(shape))  # which a layout may have padded


# -- the classes -------------------------------------------------------------------------------------------------------


class AffineQuantizedTensor(View):
    """Any quantized weight of ours without activation quantization."""

    tensor_data_names = ["tensor_impl"]  # noqa: RUF012

    holds = staticmethod(lambda w: w.act is None)

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        impl, dtype = state["tensor_impl"], shell.dtype
        held, shape = impl.__dict__, tuple(shell.shape)
        if held.get("transposed"):
            raise ValueError(
                f"a transposed {type(impl).__name__} of shape {shape} is unsupported; save the weight itself"
            )
        if type(impl).__name__ == "TensorCoreTiledAQTTensorImpl":
            raise ValueError(
                f"int4 weight {shape} packed for NVIDIA's tensor cores: load it with torchao on such a GPU, save its "
                "dequantized weights, and quantize them"
            )
        if "packed_weight" in held:
            return packed_by_aten(held["packed_weight"], held["scale_and_zero"], state["block_size"], shape, dtype)
        data = held.get("float8_data", held.get("int_data"))
        lo, hi, domain = state["quant_min"], state["quant_max"], state["zero_point_domain"]
        if isinstance(data, Shell):  # a UintxTensor
            lo, hi = (0, (1 << data.__dict__["bit_width"]) - 1) if hi is None else (lo, hi)
            data = data.codes()  # type: ignore[attr-defined]
        return weight_of(data, held["scale"], held.get("zero_point"), state["block_size"], shape, lo, hi, domain, dtype)


def _int8_asymm_per_token_quant(x: Tensor) -> QT:
    """x in int8, asymmetric, one scale a token."""
    return _of_activation(x, _ASYMMETRIC)


def _int8_symm_per_token_reduced_range_quant(x: Tensor) -> QT:
    """x in -127..127, one scale a token."""
    return _of_activation(x, _SYMMETRIC)


def _of_activation(x: Tensor, act: ActivationSpec) -> QT:
    return QT.from_float(x, act.spec, act.rule, act.eps)


_SYMMETRIC = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic", "absmax", 1e-5)
_ASYMMETRIC = ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True), "dynamic", None, INT8_EPS)
# A pickled weight with int8 inputs names one of these functions
ACTIVATIONS: dict[Any, ActivationSpec] = {
    _int8_asymm_per_token_quant: _ASYMMETRIC, _int8_symm_per_token_reduced_range_quant: _SYMMETRIC,
}  # fmt: skip


class LinearActivationQuantizedTensor(View):
    """A quantized weight with dynamic activation quantization."""

    tensor_data_names = ["original_weight_tensor"]  # noqa: RUF012

    holds = staticmethod(lambda w: w.act is not None)
    activations = ACTIVATIONS

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        func, kwargs = state["input_quant_func"], state.get("quant_kwargs")
        if kwargs or func not in cls.activations:
            raise ValueError(f"a weight with activation quantization by {func} with {kwargs} cannot be read from files")
        return state["original_weight_tensor"].with_(act=cls.activations[func])
