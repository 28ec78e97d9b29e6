"""torchao.prototype.dtypes.uint2: four 2-bit codes per byte, the first highest; handlers compute the operator they are
called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..nf4.handlers import _computes
from ..nf4.parts import SubclassTensorArgs
from .bit_fields import down_size_uint2 as down_size
from .bit_fields import pack_uint2, unpack_uint2
from .bit_fields import up_size_uint2 as up_size
from .integer_tensors import UInt2Tensor

__all__ = [
    "SubclassTensorArgs", "UInt2Tensor", "allclose", "clone", "detach", "down_size", "equal", "implements",
    "pack_uint2", "reshape", "select", "slice_tensor", "t", "to_copy", "to_dtype", "uint2_view", "unbind",
    "unpack_uint2", "unsafe_view", "up_size", "view_dtype",
]  # fmt: skip


def implemented_by(cls: type, aten_ops: Sequence[Any]) -> Callable[[Any], Any]:
    """Decorator: ``handler(func, args, kwargs)`` computes these ops of tensors of a class."""

    def add(handler: Any) -> Any:
        cls.implements(aten_ops)(lambda func, types, args, kwargs: handler(func, args, kwargs))  # type: ignore[attr-defined]
        return handler

    return add


def implements(aten_ops: Sequence[Any]) -> Callable[[Any], Any]:
    """Decorator: ``handler(func, args, kwargs)`` computes these aten ops of UInt2Tensor."""
    return implemented_by(UInt2Tensor, aten_ops)


allclose = clone = detach = equal = reshape = select = slice_tensor = t = to_copy = to_dtype = _computes
uint2_view = unbind = unsafe_view = view_dtype = _computes
