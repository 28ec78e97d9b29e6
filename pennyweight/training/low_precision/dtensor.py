"""Linear layers whose parameters are spread over ranks (DTensor): each rank multiplies its parts.

By outputs (``Shard(0)`` of the weight, ColwiseParallel) the output is cut by features and the input's gradient is a
sum over ranks; by inputs (``Shard(1)``, RowwiseParallel) the other way round. The weight's gradient is cut as it is.
Sums over ranks are DTensor's, of results in the dtype of the input, as for float layers: no codes are added.

Each rank quantizes its parts as one device would quantize them if they were all. So scales of rows and blocks are those
of one device, except along a contracted axis that is cut: there they are those of the part. A scale of which a matrix
has one in all is that of the whole matrix; ranks exchange what it is made of, three numbers an operand. Numbers of
rounding by chance follow the bits of a rank's part: equal ones are rounded equally, different ones independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.distributed.full_tensor import is_dtensor


class ShardedGroups(NamedTuple):
    """The groups of ranks, by their names, over which input, weight and gradient of the output are cut. terms: how many
    ranks' outputs make up the output."""

    input: tuple[str, ...] = ()
    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    terms: int = 1


WHOLE = ShardedGroups()


def local_arguments(
    x: Any, weight: Any, bias: Any
) -> tuple[tuple[Tensor, Tensor, Tensor | None], ShardedGroups, Callable[[Tensor], Tensor]]:
    """This rank's parts of the arguments of ``linear``, how they are cut, and what makes a DTensor of its output.

    Raises ValueError where DTensors and plain tensors are mixed, and where the weight is cut in another way than over
    outputs or inputs along each axis of its mesh.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    for t in (x, weight, bias):
        if t is not None and not is_dtensor(t):
            raise ValueError(_mixed(x, weight, bias))
    mesh, last = weight.device_mesh, x.ndim - 1
    if x.device_mesh != mesh or (bias is not None and bias.device_mesh != mesh):
        raise ValueError(
            f"linear: input and parameters of a layer {[*weight.shape]} are spread over different meshes: "
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
                "may keep it whole (Replicate), or cut it by outputs (Shard(0)) or by inputs (Shard(1)). Use "
                "ColwiseParallel or RowwiseParallel; a layer under fully_shard is called through its module"
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
    """Whether some rank has less than others of one of the DTensors: all ranks answer alike."""
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
    """What is wrong where some are DTensors and some are not."""
    named = {"input": x, "weight": weight, "bias": bias}
    said = [
        f"{name} {[*t.shape]} " + (f"is spread as {t.placements}" if is_dtensor(t) else "is a plain tensor")
        for name, t in named.items()
        if t is not None
    ]
    return (
        f"linear: {', '.join(said)}; either all are DTensors or none is. parallelize_module makes all of them such; a "
        "layer under fully_shard is called through its module; DTensor.from_local(x, mesh, placements) makes one of an "
        "input"
    )


__all__ = ["WHOLE", "ShardedGroups", "is_uneven", "local_arguments"]
