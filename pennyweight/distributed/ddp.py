"""Quantized tensors in DDP's buckets: the bytes of the parts are stored in the space of the float values.

DDP broadcasts a model's parameters in buckets that C++ joins from ``view(-1)`` of each and copies back with ``copy_``.
Broadcasting values would requantize them on each rank. The bytes of the parts fit in the space of the values. A digest
of the static properties precedes them, to detect ranks that differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.ops.inplace import check_writable, copy_parts_
from ..core.ops.parts import to_portable
from ..core.tensor import AffineQuantizedTensor
from .rank_check import mismatch_error, part_tensors, static_digest

QT = AffineQuantizedTensor
_BROADCASTS = ("torch.distributed.utils", "torch.nn.parallel.distributed")  # modules that broadcast buckets


def flatten(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """``view(-1)`` of a parameter that goes into a bucket."""
    return pack_into_bucket(w) if list(args[0]) == [-1] and who in _BROADCASTS else NotImplemented


def copy_(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """``copy_`` from a bucket."""
    if who not in _BROADCASTS or isinstance(args[0], QT):
        return NotImplemented
    check_writable(w)
    copy_parts_(w, unpack_from_bucket_(w, args[0]).to_layout(w.spec.layout))
    return w


def pack_into_bucket(w: QT) -> Tensor:
    """A tensor with dtype and numel of w that holds the bytes of its parts. Raises ValueError if they do not fit."""
    w = to_portable(w)
    raw = torch.cat([static_digest(w), *(p.contiguous().view(-1).view(torch.uint8) for p in part_tensors(w))])
    buffer = torch.zeros(w.numel() * w.dtype.itemsize, dtype=torch.uint8, device=w.device)
    if raw.numel() > buffer.numel():
        raise ValueError(
            f"a quantized tensor {tuple(w.shape)} ({w.spec}) takes {raw.numel()} bytes, more than as {w.dtype}, so it "
            "does not fit into a DDP bucket; call pennyweight.distributed.broadcast_(model) and pass init_sync=False"
        )
    buffer[: raw.numel()] = raw
    return buffer.view(w.dtype)


def unpack_from_bucket_(w: QT, numbers: Tensor) -> QT:
    """Inverse of :func:`pack_into_bucket`, for a tensor of the same kind as w. Raises ValueError for another kind."""
    buffer = to_portable(w)
    raw = numbers.contiguous().view(-1).view(torch.uint8)
    digest = static_digest(buffer)
    if not torch.equal(digest, raw[: digest.numel()]):
        raise mismatch_error(w)
    at = digest.numel()
    for p in part_tensors(buffer):
        size = p.numel() * p.element_size()
        p.copy_(raw[at : at + size].clone().view(p.dtype).view(p.shape))
        at += size
    return buffer
