"""Quantized tensors in DDP's buckets: the bytes of the parts are stored in the space of the float values.

DDP broadcasts a model's parameters in buckets that C++ joins from ``view(-1)`` of each and copies back with ``copy_``.
Broadcasting values would requantize them on each rank. The bytes of the parts fit in the space of the values. A digest
of the static properties precedes them, to detect ranks that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..layouts import READABLE, portable_layout
from ..tensor import AffineQuantizedTensor, static_json

QT = AffineQuantizedTensor


def to_portable(w: QT) -> QT:
    """w in a layout that every op reads and that is the same on every machine; writable if w is."""
    return w if w.spec.layout in READABLE else w.to_layout(portable_layout(w.spec))


def part_tensors(w: QT) -> Iterator[Tensor]:
    """The plain tensors that w is stored in, including nested ones, in a fixed order; one-byte dtypes as uint8, because
    gloo does not support all of them."""
    for p in w.parts:
        if isinstance(p, QT):
            yield from part_tensors(p)
        elif p is not None:
            yield as_bytes(p)


def as_bytes(p: Tensor) -> Tensor:
    return p.view(torch.uint8) if p.dtype.itemsize == 1 and p.dtype is not torch.bool else p


def static_digest(w: QT) -> Tensor:
    """A 32-byte digest of the static properties of w and the shapes of its parts."""
    text = f"{static_json(w.with_(readonly=False))} {[(str(p.dtype), *p.shape) for p in part_tensors(w)]}"
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=w.device)


def kind_code(w: QT) -> list[int]:
    """Four integers that are equal for shards of one tensor along its first axis: a digest of its spec, activation
    spec, dtype, other sizes, and the parts that are not sharded (tables, perm, activation scales)."""
    slots = [slot for slot, p in w.parts._asdict().items() if p is not None]
    act = None if w.act is None else w.act.to_dict()
    what = (w.spec.with_(layout="plain").to_dict(), act, str(w.dtype), tuple(w.shape[1:]), w.axes, slots)
    found = hashlib.sha256(repr(what).encode())
    for p in (w._table, w._perm, w._act_scale, w._act_zero_point):
        if isinstance(p, Tensor) and not p.is_meta:
            found.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return [int.from_bytes(found.digest()[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]


def describe_rank(w: QT) -> str:
    """Describes a rank's tensor for the error about differing ranks."""
    inputs = "" if w.act is None else f", input {w.act}"
    return f"{tuple(w.shape)} {w.spec.with_(layout='plain')}{inputs}, {w.dtype}"


def mismatch_error(w: QT, ranks: Mapping[int, str] | None = None) -> ValueError:
    """ranks: descriptions per rank, if they were exchanged."""
    have = (
        f"this one has {describe_rank(w)}"
        if ranks is None
        else "; ".join(f"rank {i} has {t}" for i, t in ranks.items())
    )
    return ValueError(
        f"ranks have different quantized tensors in one exchange: {have}. Quantize the same model with the same config "
        "on each rank"
    )


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
    mine = static_digest(buffer)
    if not torch.equal(mine, raw[: mine.numel()]):
        raise mismatch_error(w)
    at = mine.numel()
    for p in part_tensors(buffer):
        size = p.numel() * p.element_size()
        p.copy_(raw[at : at + size].clone().view(p.dtype).view(p.shape))
        at += size
    return buffer
