"""Layouts and tensor impls of torchao 0.8 to 0.17, which described the memory layout of its AffineQuantizedTensor.

Our tensors are packed for the kernel that runs, so a layout here is only a label: it is accepted, derived from the
spec, and returned by ``_layout``. Layouts of GPU-specific kernels are treated as requests for int4 or float8.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

import torch
from torch import Tensor

from pennyweight.algorithms.sparsify import prune
from pennyweight.core.formats import E4M3, E5M2
from pennyweight.core.tensor import AffineQuantizedTensor, PlainView
from pennyweight.io.codecs.torchao.affine_quantized import UintxTensor
from pennyweight.io.codecs.torchao.tensor_class import Shell, ShellMeta

from .enums import Float8MMConfig

__all__ = [
    "AQTTensorImpl", "BlockSparseLayout", "CutlassInt4PackedLayout", "CutlassSemiSparseLayout",
    "Float8AQTTensorImpl", "Float8Layout", "Int4CPUAQTTensorImpl", "Int4CPULayout",
    "Int4XPULayout", "Int8DynamicActInt4WeightCPULayout", "Layout", "MarlinQQQLayout", "MarlinSparseLayout",
    "PackedLinearInt8DynamicActivationIntxWeightLayout", "PlainAQTTensorImpl", "PlainLayout", "QDQLayout",
    "QDQTensorImpl", "SemiSparseLayout", "TensorCoreTiledAQTTensorImpl", "TensorCoreTiledLayout",
    "UintxAQTTensorImpl", "UintxLayout", "UintxTensor", "get_tensor_impl_constructor", "layout_of", "register_layout",
]  # fmt: skip

# -- layouts -----------------------------------------------------------------------------------------------------------


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
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


class _Sparse2to4(Layout):
    """Weights with two zeros in every four inputs. Here they are stored dense, with their zeros."""

    sparsity = "2:4"

    def pre_process(self, input: Tensor) -> Tensor:
        """A copy of the weight whose two smallest magnitudes of every four inputs are zero."""
        return prune(input.detach(), self.sparsity)


def _layout(name: str, doc: str, *members: Any, base: type = Layout) -> Any:
    """A layout class; members: (name, type) or (name, type, default)."""
    members = tuple((m[0], m[1], field(default=m[2])) if len(m) == 3 else m for m in members)
    space = {"__module__": __name__, "__doc__": doc}
    return make_dataclass(name, members, bases=(base,), namespace=space, frozen=True, repr=False)


PlainLayout = _layout("PlainLayout", "One code per element.")
QDQLayout = _layout("QDQLayout", "Plain codes, dequantized before each product.")
Int4CPULayout = _layout("Int4CPULayout", "4-bit weights for a CPU.")
Int4XPULayout = _layout("Int4XPULayout", "4-bit weights for an Intel GPU.")
Int8DynamicActInt4WeightCPULayout = _layout(
    "Int8DynamicActInt4WeightCPULayout", "4-bit weights with 8-bit activations for a CPU."
)
TensorCoreTiledLayout = _layout(
    "TensorCoreTiledLayout", "4-bit weights for NVIDIA's tensor cores.", ("inner_k_tiles", int, 8)
)
UintxLayout = _layout(
    "UintxLayout", "uint1 to uint7 weights packed along an axis.", ("dtype", Any), ("pack_dim", int, -1)
)
Float8Layout = _layout("Float8Layout", "float8 weights.", ("mm_config", Float8MMConfig | None, None))
CutlassInt4PackedLayout = _layout("CutlassInt4PackedLayout", "Signed 4-bit weights for CUTLASS.")
PackedLinearInt8DynamicActivationIntxWeightLayout = _layout(
    "PackedLinearInt8DynamicActivationIntxWeightLayout", "int1 to int8 weights with 8-bit activations for ARM.",
    ("target", Any, "auto"),
)  # fmt: skip
MarlinQQQLayout = _layout("MarlinQQQLayout", "4-bit weights with 8-bit activations for Marlin.")
MarlinSparseLayout = _layout("MarlinSparseLayout", "2:4 sparse 4-bit weights, symmetric.", base=_Sparse2to4)
SemiSparseLayout = _layout("SemiSparseLayout", "2:4 sparse 8-bit weights.", base=_Sparse2to4)
CutlassSemiSparseLayout = _layout("CutlassSemiSparseLayout", "2:4 sparse float8 weights.", base=_Sparse2to4)
BlockSparseLayout = _layout(
    "BlockSparseLayout", "8-bit weights without their blocks of zeros; here stored dense.", ("blocksize", int, 64)
)


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


def _impl(name: str, doc: str, *layouts: type) -> Any:
    """The impl class of some layouts; ``doc`` lists its members in torchao."""
    return ImplMeta(name, (AQTTensorImpl,), {"__module__": __name__, "__doc__": doc, "layouts": layouts})


PlainAQTTensorImpl = _impl("PlainAQTTensorImpl", "int_data, scale, zero_point.", PlainLayout, QDQLayout)
QDQTensorImpl = _impl("QDQTensorImpl", "int_data, scale, zero_point.", PlainLayout, QDQLayout)
UintxAQTTensorImpl = _impl("UintxAQTTensorImpl", "int_data (a UintxTensor), scale, zero_point.", UintxLayout)
Float8AQTTensorImpl = _impl("Float8AQTTensorImpl", "float8_data, scale, transposed.", Float8Layout)
Int4CPUAQTTensorImpl = _impl("Int4CPUAQTTensorImpl", "packed_weight, scale_and_zero, transposed.", Int4CPULayout)
TensorCoreTiledAQTTensorImpl = _impl(
    "TensorCoreTiledAQTTensorImpl", "packed_weight in the order of NVIDIA's tensor cores, scale_and_zero.",
    TensorCoreTiledLayout,
)  # fmt: skip


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
