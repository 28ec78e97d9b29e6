"""Layouts and tensor impls of torchao 0.8 to 0.17, which described the memory layout of its AffineQuantizedTensor.

Our tensors are packed for the kernel that runs, so a layout here is only a label: it is accepted, derived from the
spec, and returned by ``_layout``. Layouts of GPU-specific kernels are treated as requests for int4 or float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.formats import E4M3, E5M2
from ...core.tensor import AffineQuantizedTensor, PlainView
from .class_view import Shell, ShellMeta
from .enums import Float8MMConfig

__all__ = [
    "AQTTensorImpl", "BlockSparseLayout", "CutlassInt4PackedLayout", "CutlassSemiSparseLayout", "Float8AQTTensorImpl",
    "Float8Layout", "FloatxTensorCoreLayout", "Int4CPUAQTTensorImpl", "Int4CPULayout", "Int4XPULayout",
    "Int8DynamicActInt4WeightCPULayout", "Layout", "MarlinQQQLayout", "MarlinSparseLayout",
    "PackedLinearInt8DynamicActivationIntxWeightLayout", "PlainAQTTensorImpl", "PlainLayout", "QDQLayout",
    "QDQTensorImpl", "SemiSparseLayout", "TensorCoreTiledAQTTensorImpl", "TensorCoreTiledLayout", "UintxAQTTensorImpl",
    "UintxLayout", "UintxTensor", "get_tensor_impl_constructor", "layout_of", "register_layout", "to_uintx",
]  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Base of the layouts."""

    def pre_process(self, input: Tensor) -> Tensor:
        """Preprocessing of a float tensor before it is quantized."""
        return input

    def pre_process_static(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.pre_process(input), scale, zero_point

    def post_process(
        self, input: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Postprocessing of codes, scale and zero point before they are stored."""
        return input, scale, zero_point

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        return ""


@dataclass(frozen=True, repr=False)
class PlainLayout(Layout):
    """One code per element."""


@dataclass(frozen=True, repr=False)
class QDQLayout(Layout):
    """Plain codes, dequantized before each product."""


@dataclass(frozen=True, repr=False)
class Int4CPULayout(Layout):
    """4-bit weights for a CPU."""


@dataclass(frozen=True, repr=False)
class Int4XPULayout(Layout):
    """4-bit weights for an Intel GPU."""


@dataclass(frozen=True, repr=False)
class Int8DynamicActInt4WeightCPULayout(Layout):
    """4-bit weights with 8-bit activations for a CPU."""


@dataclass(frozen=True, repr=False)
class TensorCoreTiledLayout(Layout):
    """4-bit weights for NVIDIA's tensor cores."""

    inner_k_tiles: int = 8

    def extra_repr(self) -> str:
        return f"inner_k_tiles={self.inner_k_tiles}"


@dataclass(frozen=True, repr=False)
class UintxLayout(Layout):
    """uint1 to uint7 weights packed along an axis."""

    dtype: Any
    pack_dim: int = -1

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, pack_dim={self.pack_dim}"


@dataclass(frozen=True, repr=False)
class Float8Layout(Layout):
    """float8 weights."""

    mm_config: Float8MMConfig | None = None

    def extra_repr(self) -> str:
        return f"mm_config={self.mm_config}"


@dataclass(frozen=True, repr=False)
class FloatxTensorCoreLayout(Layout):
    """Floats of 3 to 6 bits for NVIDIA's tensor cores."""

    ebits: int
    mbits: int

    def extra_repr(self) -> str:
        return f"ebits={self.ebits}, mbits={self.mbits}"


@dataclass(frozen=True, repr=False)
class CutlassInt4PackedLayout(Layout):
    """Signed 4-bit weights for CUTLASS."""


@dataclass(frozen=True, repr=False)
class PackedLinearInt8DynamicActivationIntxWeightLayout(Layout):
    """int1 to int8 weights with 8-bit activations for ARM."""

    target: Any = "auto"


@dataclass(frozen=True, repr=False)
class MarlinQQQLayout(Layout):
    """4-bit weights with 8-bit activations for Marlin."""


class _Sparse(Layout):
    def pre_process(self, input: Tensor) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__}: sparse weights are not supported; quantize the dense weight with PlainLayout()"
        )


class MarlinSparseLayout(_Sparse):
    """2:4 sparse 4-bit weights; not supported."""


class SemiSparseLayout(_Sparse):
    """2:4 sparse 8-bit weights; not supported."""


class CutlassSemiSparseLayout(_Sparse):
    """2:4 sparse float8 weights; not supported."""


@dataclass(frozen=True, repr=False)
class BlockSparseLayout(_Sparse):
    """Block-sparse 8-bit weights; not supported."""

    blocksize: int = 64


def layout_of(w: AffineQuantizedTensor) -> Layout:
    """The layout torchao would use for this format on a CPU."""
    spec = w.spec
    if spec.format in (E4M3, E5M2):
        return Float8Layout()
    if spec.offset is not None and spec.format.bits == 4:
        return Int4CPULayout()
    if spec.format.kind == "int" and spec.format.lo == 0 and spec.format.bits < 8 and not spec.mid:
        return UintxLayout(getattr(torch, spec.format.name))
    return PlainLayout()


# -- tensor impls ----------------------------------------------------------------------------------------------------


class ImplMeta(ShellMeta):
    """isinstance() of a tensor's ``tensor_impl`` tests the layout torchao would use."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (PlainView, Pieces)) and cls.shows(instance)


@dataclass(frozen=True)
class Pieces:
    """Plain parts of a user-created impl, for building a tensor."""

    int_data: Tensor
    scale: Tensor
    zero_point: Tensor | None
    _layout: Layout

    def get_plain(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.int_data, self.scale, self.zero_point

    def get_layout(self) -> Layout:
        return self._layout


class AQTTensorImpl(Shell, metaclass=ImplMeta):
    """Base of torchao's impls. ``Impl(int_data, scale, zero_point, _layout)`` keeps the parts for
    AffineQuantizedTensor; an unpickled one keeps its attributes until its tensor is built."""

    layouts: tuple[type, ...] = (Layout,)

    @classmethod
    def shows(cls, view: Any) -> bool:
        layout = view._layout if isinstance(view, Pieces) else layout_of(view._tensor)
        return isinstance(layout, cls.layouts)

    @classmethod
    def build(cls, int_data: Tensor, scale: Tensor, zero_point: Tensor | None, _layout: Layout) -> Pieces:
        return Pieces(int_data, scale, zero_point, _layout)

    @classmethod
    def from_plain(cls, data: Tensor, scale: Tensor, zero_point: Tensor | None, _layout: Layout) -> Pieces:
        return cls.build(data, scale, zero_point, _layout)


class PlainAQTTensorImpl(AQTTensorImpl):
    """int_data, scale, zero_point."""

    layouts = (PlainLayout, QDQLayout)


class QDQTensorImpl(AQTTensorImpl):
    """int_data, scale, zero_point."""

    layouts = (PlainLayout, QDQLayout)


class UintxAQTTensorImpl(AQTTensorImpl):
    """int_data (a UintxTensor), scale, zero_point."""

    layouts = (UintxLayout,)


class Float8AQTTensorImpl(AQTTensorImpl):
    """float8_data, scale, transposed."""

    layouts = (Float8Layout,)


class Int4CPUAQTTensorImpl(AQTTensorImpl):
    """packed_weight, scale_and_zero, transposed."""

    layouts = (Int4CPULayout,)


class TensorCoreTiledAQTTensorImpl(AQTTensorImpl):
    """packed_weight in the order of NVIDIA's tensor cores, scale_and_zero."""

    layouts = (TensorCoreTiledLayout,)


class UintxTensor(Shell):
    """Unsigned integers of 1 to 7 bits in shards, as in old files. Calls return the codes as a plain uint8 tensor."""

    @classmethod
    def build(cls, shards: list[Tensor], packed_shape: Any, bit_width: int, pack_dim: int = -1) -> Tensor:
        from .bitpacking import unpack

        return unpack(shards, bit_width, pack_dim)

    def codes(self) -> Tensor:
        """Codes of an unpickled tensor, one per element."""
        held = self.__dict__
        shards = [held[f"int{bits}_shard"] for bits in (4, 2, 1) if held.get(f"int{bits}_shard") is not None]
        return UintxTensor.build(shards, held["packed_shape"], held["bit_width"], held["pack_dim"])


def to_uintx(tensor: Tensor, dtype: Any, pack_dim: int = -1) -> Tensor:
    """The codes unchanged: packing happens when a weight is built. Raises ValueError beyond the dtype's range."""
    bits = int(str(dtype).rpartition("uint")[2])
    if bool((tensor >= 1 << bits).any()):
        raise ValueError(f"to_uintx: codes up to {int(tensor.max())} do not fit {dtype}")
    return tensor.to(torch.uint8)


_IMPLS: dict[type, Any] = {}


def get_tensor_impl_constructor(layout_class: type) -> Any:
    """``from_plain`` of the impl of a layout. Raises ValueError for one without."""
    impl = _IMPLS.get(layout_class)
    if impl is None:
        impl = next((i for i in AQTTensorImpl.__subclasses__() if layout_class in i.layouts), None)
    if impl is None:
        raise ValueError(f"layout {layout_class.__name__} has no tensor impl; register one with @register_layout")
    return impl.from_plain


def register_layout(layout_class: type) -> Any:
    """Decorator for the impl of a user-defined layout. Its ``from_plain`` is called with codes, scale and zero point,
    and the result of its ``get_plain`` is stored; for your own packing and kernel, register a Layout and a Kernel of
    pennyweight (docs/tutorials/my_kernel.md)."""

    def add(impl: Any) -> Any:
        _IMPLS[layout_class] = impl
        return impl

    return add
