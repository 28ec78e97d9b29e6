"""Quantized weights of a sharded model: packing, unpacking, checkpoint loading and broadcast."""

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

from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import pack_for_kernel
from .dtensor import local_tensor


def local_weights(model: nn.Module) -> Iterator[tuple[str, AffineQuantizedTensor]]:
    """(name, this rank's part) of every quantized parameter; tied ones once."""
    for name, p in model.named_parameters():
        local = local_tensor(p)
        if isinstance(local, AffineQuantizedTensor):
            yield name, local


def unpack_(model: nn.Module) -> int:
    """Convert every quantized weight in place to the layout with one code per element; returns how many were converted.

    A distributed checkpoint is loaded into slices of weights, and packed weights cannot be sliced; see :func:`load_`.
    Parameters under fully_shard are not changed: their rows can be sliced as stored.
    """
    count, managed = 0, set(_managed(model))
    for _, w in local_weights(model):
        if w.spec.layout != "plain" and id(w) not in managed:
            w.data = w.to_layout("plain")
            count += 1
    return count


def pack_(model: nn.Module) -> int:
    """Pack every quantized weight in place for the kernel of its local shape; returns how many were converted.

    Parameters under fully_shard are not changed: their shards are all-gathered and packed afterwards.
    """
    count, managed = 0, set(_managed(model))
    for _, w in local_weights(model):
        if id(w) in managed:
            continue
        packed = pack_for_kernel(w)
        if packed.spec != w.spec:
            w.data = packed
            count += 1
    return count


def _managed(model: nn.Module) -> Iterator[int]:
    """Ids of the tensors that FSDP2 manages."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for p in module.parameters():
                yield id(local_tensor(p))


def load_(model: nn.Module, checkpoint_id: str | os.PathLike[str], prefix: str = "", **options: Any) -> None:
    """Load what ``dcp.save(model.state_dict(), checkpoint_id=...)`` wrote on any number of ranks into a sharded model.

    prefix   prefix of the names in the checkpoint, such as "model." if {"model": model.state_dict()} was saved
    options  those of torch.distributed.checkpoint.load

    The model must be quantized like the saved one; each rank reads the data of its shards, bit for bit, and packs it.
    Raises torch's CheckpointException on every rank, with the name, if a tensor is missing or has another spec.
    """
    unpack_(model)
    try:
        state = {f"{prefix}{name}": t for name, t in model.state_dict().items()}
        dcp.load(state, checkpoint_id=checkpoint_id, **options)  # type: ignore[attr-defined]  # torch re-exports it
    finally:
        pack_(model)


@torch.no_grad()
def broadcast_(model: nn.Module, src: int = 0, group: Any = None) -> None:
    """Broadcast parameters and buffers of rank ``src`` to every rank of a group, quantized ones bit for bit.

    For a model that only one rank loaded. Sharded parameters are not changed. Raises ValueError on every rank if names,
    shapes or specs differ.
    """
    state = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if not isinstance(t, DTensor)}
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, [(n, tuple(t.shape), str(t.dtype)) for n, t in state.items()], group=group)
    for rank, of_rank in enumerate(names):
        if of_rank != names[0]:
            other = next((a, b) for a, b in zip([*names[0], None], [*of_rank, None], strict=False) if a != b)
            raise ValueError(f"ranks differ in the model's state: rank 0 has {other[0]}, rank {rank} has {other[1]}")
    for t in state.values():
        dist.broadcast(t.detach(), src=src, group=group)
