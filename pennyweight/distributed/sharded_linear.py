"""Linear layers with sharded parameters (DTensor): each rank multiplies its local parts.

Sharded by outputs (``Shard(0)`` of the weight, ColwiseParallel) the output is sharded by features and the input's
gradient is a sum over ranks; sharded by inputs (``Shard(1)``, RowwiseParallel) vice versa. The weight's gradient is
sharded like the weight. DTensor sums over ranks in the dtype of the input, as for float layers; codes are not summed.

Each rank quantizes its local part like a single device. So scales of rows and blocks equal those of a single device,
except along a sharded contracted axis, where they are per part. A single scale for the whole matrix is computed over
all ranks, which exchange three numbers per operand for it. The random numbers of stochastic rounding depend on the bits
of the local part: equal parts are rounded equally, different parts independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dtensor import is_dtensor


class ShardedGroups(NamedTuple):
    """Names of the process groups over which input, weight and output gradient are sharded. terms: number of ranks
    whose outputs are summed."""

    input: tuple[str, ...] = ()
    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    terms: int = 1


WHOLE = ShardedGroups()


def local_arguments(
    x: Any, weight: Any, bias: Any
) -> tuple[tuple[Tensor, Tensor, Tensor | None], ShardedGroups, Callable[[Tensor], Tensor]]:
    """(this rank's parts of the arguments of ``linear``, their sharding, a function that makes the output a DTensor).

    Raises ValueError if DTensors and plain tensors are mixed, and if the weight is sharded other than by outputs or
    inputs along each axis of its mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for t in (x, weight, bias):
        if t is not None and not is_dtensor(t):
            raise ValueError(_mixed(x, weight, bias))
    mesh, last = weight.device_mesh, x.ndim - 1
    if x.device_mesh != mesh or (bias is not None and bias.device_mesh != mesh):
        raise ValueError(
            f"linear: input and parameters of a layer {[*weight.shape]} are on different meshes: "
            f"{x.device_mesh} and {mesh}; parallelize the layer on the mesh of its input"
        )
    # Placements along each axis of the mesh: input, bias, output; gradients of input, weight, bias.
    rows: list[tuple[Any, ...]] = []
    cut: tuple[list[str], list[str], list[str]] = ([], [], [])
    terms = 1
    for axis, (given, placed) in enumerate(zip(x.placements, weight.placements, strict=True)):
        whole, tokens = Replicate(), isinstance(given, Shard) and given.dim < last
        if isinstance(placed, Shard) and placed.dim == 0:
            where = (False, True, True)
            rows.append((whole, Shard(0), Shard(last), Partial(), Shard(0), Shard(0)))
        elif isinstance(placed, Shard):
            where = (True, True, False)
            terms *= mesh.size(axis)
            rows.append((Shard(last), whole, Partial(), Shard(last), Shard(1), whole))
        elif isinstance(placed, Replicate) and tokens:
            where = (True, False, True)
            rows.append((given, whole, given, given, Partial(), Partial()))
        elif isinstance(placed, Replicate):
            where = (False, False, False)
            rows.append((whole,) * 6)
        else:
            raise ValueError(
                f"linear: a weight {[*weight.shape]} is placed as {weight.placements} on {mesh}; each axis of the mesh "
                "may replicate it (Replicate), or shard it by outputs (Shard(0)) or by inputs (Shard(1)). Use "
                "ColwiseParallel or RowwiseParallel; call a layer under fully_shard through its module"
            )
        for names, is_cut in zip(cut, where, strict=True):
            if is_cut:
                names.append(mesh.get_group(axis).group_name)
    x_put, bias_put, y_put, grad_x, grad_w, grad_bias = zip(*rows, strict=True)
    shape = (*x.shape[:-1], weight.shape[0])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))

    def put(y: Tensor) -> Tensor:
        return DTensor.from_local(y, mesh, y_put, run_check=False, shape=torch.Size(shape), stride=stride)

    def part(t: Any, placements: Any, gradient: Any) -> Tensor:
        if tuple(t.placements) != placements:
            t = t.redistribute(placements=placements)
        return t.to_local(grad_placements=gradient)

    local = (
        part(x, x_put, grad_x),
        part(weight, tuple(weight.placements), grad_w),
        None if bias is None else part(bias, bias_put, grad_bias),
    )
    return local, ShardedGroups(tuple(cut[0]), tuple(cut[1]), tuple(cut[2]), terms), put


def is_uneven(*tensors: Any) -> bool:
    """Whether one of the DTensors is sharded unevenly; the same result on all ranks."""
    for t in tensors:
        shape = list(t.shape) if is_dtensor(t) else []
        for axis, placed in enumerate(t.placements if shape else ()):
            if placed.is_shard():
                size = t.device_mesh.size(axis)
                if shape[placed.dim] % size:
                    return True
                shape[placed.dim] //= size
    return False


def _mixed(x: Any, weight: Any, bias: Any) -> str:
    """Error message if only some arguments are DTensors."""
    named = {"input": x, "weight": weight, "bias": bias}
    said = [
        f"{name} {[*t.shape]} " + (f"is a DTensor with {t.placements}" if is_dtensor(t) else "is a plain tensor")
        for name, t in named.items()
        if t is not None
    ]
    return (
        f"linear: {', '.join(said)}; either all must be DTensors or none. parallelize_module converts all of them; "
        "call a layer under fully_shard through its module; convert an input with DTensor.from_local(x, mesh, "
        "placements)"
    )
