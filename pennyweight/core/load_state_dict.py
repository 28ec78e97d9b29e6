"""``Module.load_state_dict`` where quantized tensors are on either side: the ``assign`` of a call alone decides.

assign=False writes numbers into the parameters that the module has; what they are (float, or quantized under a spec)
stays. assign=True makes the parameters what the state dict holds.

torch (2.13 and before) keeps assign=True of a call in the metadata of the state dict (``state_dict._metadata``, which
torch.save stores as well), where every later call with the same state dict finds it. So the mark is taken away again as
soon as a quantized tensor is seen in a load; a call with assign=False that would obey a mark of an earlier one, made by
a load of floats only, is refused.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch import nn

from .tensor import FUNCTIONS, AffineQuantizedTensor, implements

QT = AffineQuantizedTensor
_MARK = "assign_to_params_buffers"  # as torch names it
_INTO = nn.Module._load_from_state_dict.__code__
_DEPTH = 12  # frames looked at: torch.overrides and hooks of subclasses lie between


def _load() -> tuple[FrameType, FrameType] | None:
    """Frames of ``Module._load_from_state_dict`` and of ``load`` in ``Module.load_state_dict``, where the call being
    handled comes from there; what calls the former by itself has its own meaning of the mark."""
    frame, into = sys._getframe(2), None
    for _ in range(_DEPTH):
        if frame.f_code is _INTO:
            into = frame
        elif into is not None and frame.f_code.co_name == "load" and frame.f_globals is nn.Module.__call__.__globals__:
            return into, frame
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _unmark(frames: tuple[FrameType, FrameType] | None) -> None:
    """Take the mark away. Raises RuntimeError where this call has not made it, and would obey it."""
    if frames is None:
        return
    into, load = (frame.f_locals for frame in frames)
    if not into["local_metadata"].pop(_MARK, False) or load.get("assign", True):
        return
    for metadata in (load.get("metadata") or {}).values():
        metadata.pop(_MARK, None)
    raise RuntimeError(
        "load_state_dict(assign=False): an earlier call with assign=True left a mark in this state dict (its _metadata "
        f"at {into['prefix'].rstrip('.') or 'the model'}), which PyTorch would obey and assign. The marks are removed "
        "now: call load_state_dict again, with assign=True if its tensors are to become the parameters"
    )


@implements(torch.Tensor.is_meta.__get__, table=FUNCTIONS)  # type: ignore[attr-defined]
def _is_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Asked of each parameter before something is loaded into it."""
    if not torch.compiler.is_compiling() and sys._getframe(2).f_code is _INTO:
        _unmark(_load())
    return NotImplemented


@implements(torch.Tensor.requires_grad_, table=FUNCTIONS)
def _requires_grad_(func: Any, args: Any, kwargs: Any) -> Any:
    """Asked of what becomes a parameter."""
    if not torch.compiler.is_compiling():
        _unmark(_load())
    return NotImplemented


def warn_of_copy(target: torch.Tensor, source: QT) -> None:
    """Warn where load_state_dict copies a quantized tensor into a parameter of another form, which stays what it is."""
    into = None if torch.compiler.is_compiling() else _load()
    if into is None or target.is_meta:
        return
    here = f"{_named(target)} parameters" if isinstance(target, QT) else "float parameters"
    warnings.warn(
        f"load_state_dict(assign=False) writes the numbers of quantized tensors ({_named(source)}) into {here}, which "
        "stay what they are; load_state_dict(state_dict, assign=True) takes the quantized tensors as they are",
        UserWarning,
        stacklevel=2,
    )


def _named(w: QT) -> str:
    return str(w.spec.with_(layout="plain")) + ("" if w.act is None else f" × {w.act}")
