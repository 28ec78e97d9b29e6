"""torchao.prototype.dtypes.bitnet; handlers compute the operator they are called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..nf4.handlers import _computes
from .bit_fields import pack_uint2, unpack_uint2
from .integer_tensors import BitnetTensor, UInt2Tensor
from .uint2 import implemented_by

__all__ = [
    "BitnetTensor", "UInt2Tensor", "addmm", "allclose", "clone", "detach", "implements", "mm", "pack_uint2", "t",
    "to_dtype", "unpack_uint2",
]  # fmt: skip


def implements(aten_ops: Sequence[Any]) -> Callable[[Any], Any]:
    """Decorator: ``handler(func, args, kwargs)`` computes these aten ops of BitnetTensor."""
    return implemented_by(BitnetTensor, aten_ops)


addmm = allclose = clone = detach = mm = t = to_dtype = _computes
