"""Checks that all ranks have the same kind of quantized tensor, before they exchange its data.

A rank whose model is not quantized would send floats while the others send codes. Backends do not detect this: gloo
terminates the process if sizes differ and returns garbage if they match. The store of the process group shows which
ranks are missing (:func:`wait_for_all_ranks`); digests show which tensors differ.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..core.ops.parts import stored_tensors
from ..core.tensor import AffineQuantizedTensor, static_json

QT = AffineQuantizedTensor
PATIENCE = 30.0  # seconds of waiting before a warning
_COUNTS: Counter[str] = Counter()  # number of checks per group so far


def part_tensors(w: QT) -> Iterator[Tensor]:
    """The plain tensors that w is stored in, including nested ones, in a fixed order; one-byte dtypes as uint8, because
    gloo does not support all of them."""
    return map(as_bytes, stored_tensors(w))


def as_bytes(p: Tensor) -> Tensor:
    return p.view(torch.uint8) if p.dtype.itemsize == 1 and p.dtype is not torch.bool else p


def static_digest(w: QT) -> Tensor:
    """A 32-byte digest of the static properties of w and the shapes of its parts."""
    text = f"{static_json(w.with_(readonly=False))} {[(str(p.dtype), *p.shape) for p in part_tensors(w)]}"
    return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=w.device)


def kind_code(w: QT) -> list[int]:
    """Four integers that are equal for shards of one tensor along its first axis: a digest of its spec, activation
    spec, dtype, other sizes, and the parts that are not sharded (tables, perm, pre_scale, activation scales)."""
    slots = [slot for slot, p in w.parts._asdict().items() if p is not None]
    act = None if w.act is None else w.act.to_dict()
    what = (w.spec.with_(layout="plain").to_dict(), act, str(w.dtype), tuple(w.shape[1:]), w.axes, slots)
    found = hashlib.sha256(repr(what).encode())
    for p in (w._table, w._perm, w._pre_scale, w._act_scale, w._act_zero_point):
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


def require_same_kind(group: Any, w: QT) -> None:
    """Raise ValueError on every rank of a group unless all ranks have a tensor of the same kind and size."""
    own = static_digest(w)
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([gathered], [own]).wait()
    if any(not torch.equal(one, own) for one in gathered):
        raise mismatch_error(w)


def wait_for_all_ranks(group: Any, w: QT) -> None:
    """Wait for all ranks of a group to call this. Warns after :data:`PATIENCE`; after the group's timeout raises
    ValueError with the missing ranks."""
    store, name = c10d._get_default_store(), str(group.group_name)
    turn = _COUNTS[name]
    _COUNTS[name] += 1
    everyone = dist.get_process_group_ranks(group)
    keys = {rank: f"pennyweight/{name}/{turn}/{rank}" for rank in everyone}
    store.set(keys[dist.get_rank()], "here")
    start, limit = time.monotonic(), _timeout(group, w)
    warned = False
    while True:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if not missing:
            return
        waited = time.monotonic() - start
        text = (
            f"rank {dist.get_rank()} is about to exchange a quantized tensor {tuple(w.shape)} ({w.spec}), but after "
            f"{waited:.0f} s rank {', '.join(map(str, missing))} has not sent one. Quantize the same model with the "
            "same config on each rank, before fully_shard"
        )
        if waited > limit:
            raise ValueError(text)
        if waited > PATIENCE and not warned:
            warned = True
            warnings.warn(text, stacklevel=2)
        time.sleep(min(0.001 + waited / 10, 0.5))


def _timeout(group: Any, w: QT) -> float:
    """Timeout of the group's collectives, in seconds."""
    options = getattr(group._get_backend(w.device), "options", None)
    limit = getattr(options, "_timeout", None) or c10d.default_pg_timeout
    return (limit if isinstance(limit, timedelta) else c10d.default_pg_timeout).total_seconds()
