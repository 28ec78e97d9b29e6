"""The registration point of pennyweight/distributed, which answers torch.distributed. core knows no rank and no mesh.

torch.distributed slices, pads, copies and allocates with ordinary tensor functions, sends tensors with the c10d ops and
asks a parameter for FSDP2's two hooks. :data:`HANDLERS` has an entry for each of these. It is filled by the module that
``load_with`` names, when torch.distributed is in use and first reaches a quantized tensor. Until then a call costs one
check, and nothing of torch.distributed is imported.

The check is made at each call because no import announces it: torch itself imports DDP, and transformers imports
DTensor in programs with a single process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .call_site import refuse_disk_offload
from .tensor import FUNCTIONS, AffineQuantizedTensor, implements

QT = AffineQuantizedTensor
HANDLERS: dict[Any, Callable[..., Any]] = {}  # torch function, aten op, namespace of ops, or FSDP2 hook -> handler
_LOADERS: list[Callable[[], object]] = []
_is_initialized: Callable[[], bool] = getattr(torch.distributed, "is_initialized", lambda: False)


def load_with(load: Callable[[], object]) -> None:
    """Register what imports the handlers; called once, by the package (core imports no higher layer)."""
    _LOADERS.append(load)


def handlers() -> dict[Any, Callable[..., Any]]:
    """HANDLERS, filled."""
    for load in tuple(_LOADERS):
        load()
        _LOADERS.clear()  # only now, so that a second thread waits for the import too
    return HANDLERS


def in_use() -> bool:
    """Whether torch.distributed may call: there is a process group, or a checkpoint is read by a single process."""
    return _is_initialized() or "torch.distributed.checkpoint" in sys.modules


def answer(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call that torch.distributed makes on a quantized tensor; NotImplemented for other callers."""
    return handlers()[func](func, args, kwargs) if in_use() else NotImplemented


@implements(
    torch.chunk, torch.Tensor.chunk, torch.narrow, torch.Tensor.narrow, torch.Tensor.new_zeros, F.pad,
    torch.Tensor.view, torch.Tensor.copy_, table=FUNCTIONS,
)  # fmt: skip
def _function(func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], QT):
        return NotImplemented
    if func is torch.Tensor.view:
        refuse_disk_offload(args[0])
    return answer(func, args, kwargs)


@implements("c10d", "_c10d_functional")
def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Every op of these namespaces, because torch defines some of them lazily."""
    return handlers()[func.namespace](func, args, kwargs)


def fsdp_pre_all_gather(w: QT, mesh: Any) -> Any:
    """FSDP2's hook: the tensors to send for a shard, and their metadata."""
    return handlers()["fsdp_pre_all_gather"](w, mesh)


def fsdp_post_all_gather(w: QT, gathered: Any, rows: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """FSDP2's hook: the full tensor from the gathered shards."""
    return handlers()["fsdp_post_all_gather"](w, gathered, rows, dtype, out)


# FSDP2 looks for these by name.
setattr(QT, fsdp_pre_all_gather.__name__, fsdp_pre_all_gather)
setattr(QT, fsdp_post_all_gather.__name__, fsdp_post_all_gather)
