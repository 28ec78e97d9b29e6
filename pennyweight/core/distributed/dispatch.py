"""Who calls: torch.distributed's own code, or anybody else.

It cuts, pads, copies and flattens parameters with the functions that everybody calls, and means other things by them
(see dtensor.py and ddp.py). Nothing about such a call tells it from others but the code that it comes from.

What answers them is imported when the first of them comes: most programs have none.
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
PACK: list[Callable[[QT], QT]] = []  # how a weight is packed for the kernel of its shape; put here by the kernels

_THEIRS = ("torch.distributed.", "torch.nn.parallel.distributed")
_NEAR = 6  # frames between a function of ours and what calls it
_BETWEEN = (__name__.partition(".")[0] + ".", "torch.overrides", "torch.nn.functional", "torch._tensor")


def caller() -> str:
    """Module of torch.distributed whose code makes the call being handled; "" for other callers."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not f"{name}.".startswith(_BETWEEN):
            return name if name.startswith(_THEIRS) else ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def refuse_disk_offload(w: QT) -> None:
    """Raise TypeError where accelerate is writing a weight to its folder of arrays, which have room for numbers only.

    What would come back is a float weight: as many bytes as if nothing had been quantized, and another layer where
    inputs are quantized too.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == "accelerate.utils.offload":
            raise TypeError(
                f"accelerate's offload to disk stores a quantized weight {tuple(w.shape)} ({w.spec}) as float numbers. "
                "Save the model by pw.save(model, folder), and give what is mapped from there to "
                "accelerate.cpu_offload(model, execution_device, state_dict=pw.open(folder))"
            )
        frame = frame.f_back


def broadcasts_buckets() -> bool:
    """Whether DDP is broadcasting a model's state in buckets, which it flattens below Python."""
    return caller() in ("torch.distributed.utils", "torch.nn.parallel.distributed")


@implements(
    torch.chunk, torch.Tensor.chunk, torch.narrow, torch.Tensor.narrow, torch.Tensor.new_zeros, F.pad,
    torch.Tensor.view, torch.Tensor.copy_, table=FUNCTIONS,
)  # fmt: skip
def _asked(func: Any, args: Any, kwargs: Any) -> Any:
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
    """Any op of these namespaces, by name: torch defines some of them long after it is imported."""
    from .collectives import collective

    return collective(func, args, kwargs)


def fsdp_pre_all_gather(w: QT, mesh: Any) -> Any:
    """FSDP2's hook: what is sent of a shard, and what is known about it."""
    from .fsdp import all_gather_inputs

    return all_gather_inputs(w, mesh)


def fsdp_post_all_gather(w: QT, gathered: Any, rows: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """FSDP2's hook: the whole tensor of what was gathered."""
    from .fsdp import all_gather_output

    return all_gather_output(w, gathered, rows, dtype, out)


# FSDP2 looks for these by name.
setattr(QT, fsdp_pre_all_gather.__name__, fsdp_pre_all_gather)
setattr(QT, fsdp_post_all_gather.__name__, fsdp_post_all_gather)
