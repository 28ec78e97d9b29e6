"""FSDP2's all-gather of a quantized parameter: its parts are gathered as stored.

A parameter is sharded along its first axis, and so are parts with an entry per block on that axis. For parts with one
entry on that axis (a per-tensor scale) every rank sends its own and uses that of the first rank, because ranks without
rows have none. Tables and ``perm`` are on every rank and are not sent. The gathered parameter is packed for its kernel.
Before the first exchange the ranks compare the static properties of their shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.ops.parts import stored_tensors, to_portable
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import pack_for_kernel
from .rank_check import as_bytes, describe_rank, kind_code, mismatch_error, wait_for_all_ranks

QT = AffineQuantizedTensor
PARAMETERS = ("scale", "zero_point", "offset")


def flatten(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """``view(-1)``: FSDP2 flattens its shard, but does not use the result for tensors with their own all-gather."""
    return w.detach() if args == (-1,) and who.startswith("torch.distributed.fsdp") else NotImplemented


class ShardRows(NamedTuple):
    """Rows of the largest shard, to which all others are padded; total rows; ranks."""

    shard: int
    total: int
    ranks: int


def _rows(w: QT, mesh: Any) -> ShardRows:
    """FSDP2 passes only the mesh to a hook that accepts uneven shards, so the ranks exchange their number of rows and
    the kind of their shards, once. Raises ValueError on every rank if the kinds differ.
    """
    if "rows" not in w._bound:
        group = mesh.get_group()
        if mesh.size() > 1:
            wait_for_all_ranks(group, w)
        own = torch.tensor([w.shape[0], *kind_code(w)], dtype=torch.int64, device=w.device)
        gathered_kinds = [torch.empty_like(own) for _ in range(mesh.size())]
        dist.all_gather(gathered_kinds, own, group=group)
        if any(not torch.equal(one[1:], own[1:]) for one in gathered_kinds):
            kinds: list[Any] = [None] * mesh.size()
            dist.all_gather_object(kinds, describe_rank(w), group=group)
            raise mismatch_error(w, dict(zip(dist.get_process_group_ranks(group), kinds, strict=True)))
        counts = [int(one[0]) for one in gathered_kinds]
        w._bound["rows"] = ShardRows(max(counts), sum(counts), len(counts))
    return w._bound["rows"]


def _block(spec: QuantSpec, ndim: int, rows: int) -> int:
    """Block size on the first axis of a shard of ``rows``; 0 if one block covers the axis on all ranks. A block that
    covers one shard but not all would have been refined."""
    if spec.block is None:
        return 0
    block = spec.block[0] if len(spec.block) == ndim else 1
    return 0 if block == -1 or block > rows else block


def _layout(w: QT, rows: int) -> Iterator[tuple[QT, str, int]]:
    """(quantized tensor, slot, entries on the slot's first axis) of each sharded part of w, including nested tensors;
    rows: entries of w's first axis."""
    block = _block(w.spec, w.ndim, rows)
    yield w, "codes", -(-rows // block) * block if block else rows
    for slot in PARAMETERS:
        p = getattr(w, f"_{slot}")
        if p is None:
            continue
        count = -(-rows // block) if block else 1
        if isinstance(p, QT):
            yield from _layout(p, count)
        else:
            yield w, slot, count


def all_gather_inputs(w: QT, mesh: Any) -> tuple[tuple[Tensor, ...], ShardRows]:
    """(plain tensors that this shard sends, each padded to the largest shard's; rows)."""
    rows, w = _rows(w, mesh), to_portable(w)
    if rows.ranks == 1:  # torch 2.13 then uses only the first tensor
        return (as_bytes(w._codes.new_zeros(1)),), rows
    out = []
    for owner, slot, count in _layout(w, rows.shard):
        p = getattr(owner, f"_{slot}")
        if p.shape[0] < count:
            p = torch.cat([p, p.new_zeros((count - p.shape[0], *p.shape[1:]))])
        out.append(as_bytes(p.contiguous()))
    return tuple(out), rows


def all_gather_output(
    w: QT, gathered: tuple[Tensor, ...], rows: ShardRows, dtype: torch.dtype, out: Tensor | None = None
) -> Any:
    """The full parameter from the gathered shards, and those of its tensors that have their own memory; written into
    ``out`` if given."""
    parts = iter(gathered)
    shard = to_portable(w)

    def whole(w: QT, rows: int, total: int) -> QT:
        block = _block(w.spec, w.ndim, rows)
        count = -(-total // block) if block else 1
        slots: dict[str, Any] = {"codes": next(parts).view(w._codes.dtype)[: count * block if block else total]}
        for slot in PARAMETERS:
            p = getattr(w, f"_{slot}")
            if p is None:
                continue
            if isinstance(p, QT):
                slots[slot] = whole(p, -(-rows // block) if block else 1, count)
            else:
                slots[slot] = next(parts).view(p.dtype)[:count]
        return w.with_(shape=(total, *w.shape[1:]), readonly=False, **slots)

    value = pack_for_kernel((shard if rows.ranks == 1 else whole(shard, rows.shard, rows.total)).with_(dtype=dtype))
    if out is not None:
        assert isinstance(out, QT)
        _refill(out, value)
        return None
    given = {t.untyped_storage().data_ptr() for t in (*gathered, *stored_tensors(w))}
    return value, [t for t in stored_tensors(value) if t.untyped_storage().data_ptr() not in given]


def _refill(out: QT, value: QT) -> None:
    for part, new in zip(stored_tensors(out), stored_tensors(value), strict=True):
        if part.data_ptr() != new.data_ptr():
            part.copy_(new)
