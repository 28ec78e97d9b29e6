"""Parameters that torch spreads over ranks (DTensor), for code that works on whole tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor. Nothing is imported: without the module there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def full_tensor(t: Any) -> Any:
    """All of a tensor: that of all ranks where it is spread over them, which all must ask for; else itself."""
    return t.full_tensor() if is_dtensor(t) else t


def local_tensor(t: Any) -> Any:
    """This rank's part of a tensor."""
    return t._local_tensor if is_dtensor(t) else t


def wait_tensor(t: Tensor) -> Tensor:
    """t itself, where it is what a collective that may still run will give."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    pending = module is not None and isinstance(t, module.AsyncCollectiveTensor)
    return t.wait() if pending else t  # type: ignore[attr-defined]


def all_reduce(t: Tensor, op: str, groups: Sequence[str]) -> Tensor:
    """The "sum", or the "max", of a tensor over all ranks of groups, which are given by name, one after another."""
    for name in groups:
        t = torch.ops._c10d_functional.all_reduce.default(t, op, name)
        t = torch.ops._c10d_functional.wait_tensor.default(t)
    return t


def distribute_like(t: Tensor, like: Any) -> Tensor:
    """t, which is whole and equal on all ranks, spread over them as ``like`` is; nothing is sent."""
    if not is_dtensor(like):
        return t
    module = sys.modules["torch.distributed.tensor"]
    return module.distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)


def is_fully_sharded(module: Any) -> bool:
    """Whether FSDP2 manages a module's parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and hasattr(fsdp, "FSDPModule") and isinstance(module, fsdp.FSDPModule)
