"""Detects calls from torch.distributed and dispatches them to their own handlers.

torch.distributed cuts, pads, copies and flattens parameters with the ordinary tensor functions but needs different
results (see dtensor.py and ddp.py). Such calls can be recognized only by their caller.

The handlers are imported at the first such call, because most programs have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F

from ..tensor import FUNCTIONS, AffineQuantizedTensor, implements

QT = AffineQuantizedTensor
PACK: list[Callable[[QT], QT]] = []  # packs a weight for the kernel of its shape; registered by the kernels

_CALLERS = ("torch.distributed.", "torch.nn.parallel.distributed")
_MAX_FRAMES = 6  # maximum number of frames between a function of this package and its caller
_SKIPPED = (__name__.partition(".")[0] + ".", "torch.overrides", "torch.nn.functional", "torch._tensor")


def caller() -> str:
    """The torch.distributed module that makes the current call; "" for other callers."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not f"{name}.".startswith(_SKIPPED):
            return name if name.startswith(_CALLERS) else ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def refuse_disk_offload(w: QT) -> None:
    """Raise TypeError if accelerate is offloading a weight to disk, because its array files can hold only floats.

    The weight would be loaded as float: as large as without quantization, and with different results if activations
    are quantized.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == "accelerate.utils.offload":
            raise TypeError(
                f"accelerate's offload to disk stores a quantized weight {tuple(w.shape)} ({w.spec}) as float numbers. "
                "Save the model with pw.save(model, folder) and call "
                "accelerate.cpu_offload(model, execution_device, state_dict=pw.open(folder)), which maps the files"
            )
        frame = frame.f_back


def broadcasts_buckets() -> bool:
    """Whether DDP is broadcasting a model's state in buckets, which it flattens in C++."""
    return caller() in ("torch.distributed.utils", "torch.nn.parallel.distributed")


@implements(
    torch.chunk, torch.Tensor.chunk, torch.narrow, torch.Tensor.narrow, torch.Tensor.new_zeros, F.pad,
    torch.Tensor.view, torch.Tensor.copy_, table=FUNCTIONS,
)  # fmt: skip
def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not args or not isinstance(args[0], QT):
        return NotImplemented
    if func is torch.Tensor.view:
        refuse_disk_offload(args[0])
    who = caller()
    if not who:
        return NotImplemented
    from .dtensor import ANSWERS

    return ANSWERS[func](args[0], args[1:], kwargs, who)


@implements("c10d", "_c10d_functional")
def _collective(func: Any, args: Any, kwargs: Any) -> Any:
    """Handles every op of these namespaces by name, because torch defines some of them lazily."""
    from .collectives import collective

    return collective(func, args, kwargs)


def fsdp_pre_all_gather(w: QT, mesh: Any) -> Any:
    """FSDP2's hook: the tensors to send for a shard, and their metadata."""
    from .fsdp import all_gather_inputs

    return all_gather_inputs(w, mesh)


def fsdp_post_all_gather(w: QT, gathered: Any, rows: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """FSDP2's hook: the full tensor from the gathered shards."""
    from .fsdp import all_gather_output

    return all_gather_output(w, gathered, rows, dtype, out)


# FSDP2 looks for these by name.
setattr(QT, fsdp_pre_all_gather.__name__, fsdp_pre_all_gather)
setattr(QT, fsdp_post_all_gather.__name__, fsdp_post_all_gather)
