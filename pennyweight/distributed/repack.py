"""Quantized weights of a model that is spread over ranks: packed for their kernels or portable, and made equal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..core.distributed.full_tensor import local_tensor
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import prepare


def local_weights(model: nn.Module) -> Iterator[tuple[str, AffineQuantizedTensor]]:
    """(name, this rank's part) of every quantized parameter, tied ones once."""
    for name, p in model.named_parameters():
        local = local_tensor(p)
        if isinstance(local, AffineQuantizedTensor):
            yield name, local


def unpack_(model: nn.Module) -> int:
    """Put every quantized weight in the layout that has a code an element, in place; how many were in another.

    A distributed checkpoint is loaded into slices of weights, and a packed one has none; see :func:`load_`. Parameters
    under fully_shard are left alone: rows of theirs are slices as they lie.
    """
    count, theirs = 0, set(_managed(model))
    for _, w in local_weights(model):
        if w.spec.layout != "plain" and id(w) not in theirs:
            w.data = w.to_layout("plain")
            count += 1
    return count


def pack_(model: nn.Module) -> int:
    """Pack every quantized weight for the kernel of its own shape on this rank, in place; how many were in another.

    Parameters under fully_shard are left alone: their shards travel, and are packed when they are whole.
    """
    count, theirs = 0, set(_managed(model))
    for _, w in local_weights(model):
        if id(w) in theirs:
            continue
        packed = prepare(w, ("bmm" if w.ndim == 3 else "linear",))
        if packed.spec != w.spec:
            w.data = packed
            count += 1
    return count


def _managed(model: nn.Module) -> Iterator[int]:
    """Which tensors FSDP2 has taken over."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for p in module.parameters():
                yield id(local_tensor(p))


def load_(model: nn.Module, checkpoint_id: str | os.PathLike[str], prefix: str = "", **options: Any) -> None:
    """Load what ``dcp.save(model.state_dict(), checkpoint_id=...)`` wrote on any number of ranks into a sharded model.

    prefix   before the names in the checkpoint, such as "model." where {"model": model.state_dict()} was saved
    options  those of torch.distributed.checkpoint.load

    The model is quantized as the saved one was; each rank reads what its shards need, bit for bit, and packs it. Raises
    CheckpointException (torch's) on every rank where a tensor is missing or of another spec, and names it.
    """
    unpack_(model)
    try:
        state = {f"{prefix}{name}": t for name, t in model.state_dict().items()}
        dcp.load(state, checkpoint_id=checkpoint_id, **options)
    finally:
        pack_(model)


@torch.no_grad()
def broadcast_(model: nn.Module, src: int = 0, group: Any = None) -> None:
    """Give every rank of a group the parameters and buffers of rank ``src``, quantized ones bit for bit.

    For a model that one rank loaded and others only built. Sharded parameters are left alone. Raises ValueError on
    every rank where they differ in names, shapes or specs.
    """
    state = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not isinstance(t, DTensor)}
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, [(n, tuple(t.shape), str(t.dtype)) for n, t in state.items()], group=group)
    for rank, theirs in enumerate(names):
        if theirs != names[0]:
            other = next((a, b) for a, b in zip([*names[0], None], [*theirs, None], strict=False) if a != b)
            raise ValueError(f"ranks differ in the model's state: rank 0 has {other[0]}, rank {rank} has {other[1]}")
    for t in state.values():
        dist.broadcast(t.detach(), src=src, group=group)
