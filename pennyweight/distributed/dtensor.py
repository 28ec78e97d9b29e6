"""Parameters that are DTensors, for code that also gets ordinary tensors: whole value, local part, placement.

Nothing is imported for it: where torch.distributed.tensor is not loaded, there are no DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_dtensor(t: Any) -> bool:
    """Whether t is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def full_tensor(t: Any) -> Any:
    """The full tensor of a DTensor (a collective, so all ranks must call it); any other tensor unchanged."""
    return t.full_tensor() if is_dtensor(t) else t


def local_tensor(t: Any) -> Any:
    """The local shard of a DTensor; any other tensor unchanged."""
    return t._local_tensor if is_dtensor(t) else t


def wait_tensor(t: Tensor) -> Tensor:
    """t, after waiting for it if it is the result of an asynchronous collective."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    pending = module is not None and isinstance(t, module.AsyncCollectiveTensor)
    return t.wait() if pending else t  # type: ignore[attr-defined]


def distribute_like(t: Tensor, like: Any) -> Tensor:
    """Shard t, which is whole and equal on all ranks, like the DTensor ``like``; without communication."""
    if not is_dtensor(like):
        return t
    module = sys.modules["torch.distributed.tensor"]
    return module.distribute_tensor(t, like.device_mesh, like.placements, src_data_rank=None)


def is_fully_sharded(module: Any) -> bool:
    """Whether FSDP2 manages a module's parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and hasattr(fsdp, "FSDPModule") and isinstance(module, fsdp.FSDPModule)


def wrap_like(local: Tensor, like: Any) -> Tensor:
    """A DTensor of this rank's part, placed like the DTensor ``like``; ``local`` if ``like`` is an ordinary tensor."""
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    placed = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **placed)


def mesh_coordinate(t: Any) -> tuple[int, ...]:
    """Coordinate of this rank in the mesh of a DTensor; () for other tensors."""
    return tuple(t.device_mesh.get_coordinate() or ()) if is_dtensor(t) else ()


def local_gradient(p: Any) -> Tensor:
    """This rank's part of the gradient of a parameter, sharded like the parameter."""
    g = p.grad
    assert g is not None
    if is_dtensor(p) and is_dtensor(g) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    return local_tensor(g)
