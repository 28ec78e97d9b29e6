"""``Module.load_state_dict`` with quantized tensors in the module or the state dict: only ``assign`` matters.

assign=False writes values into the existing parameters, which keep their kind (float, or quantized under their spec).
assign=True replaces the parameters with the tensors of the state dict.

torch (2.13 and earlier) stores assign=True in the metadata of the state dict (``state_dict._metadata``, which
torch.save also saves), and every later call with the same state dict uses it. So this module removes the mark as soon
as a load involves a quantized tensor. If an earlier load of only floats left a mark, a call with assign=False raises.
"""

from __future__ import annotations

import warnings
from types import FrameType
from typing import Any

import torch

from .call_site import load_state_dict_frames, loads_state_dict
from .tensor import FUNCTIONS, AffineQuantizedTensor, implements

QT = AffineQuantizedTensor
_MARK = "assign_to_params_buffers"  # as torch names it


def _unmark(frames: tuple[FrameType, FrameType] | None) -> None:
    """Remove the mark. Raises RuntimeError if an earlier call made it and this call would follow it."""
    if frames is None:
        return
    into, load = (frame.f_locals for frame in frames)
    if not into["local_metadata"].pop(_MARK, False) or load.get("assign", True):
        return
    for metadata in (load.get("metadata") or {}).values():
        metadata.pop(_MARK, None)
    raise RuntimeError(
        "load_state_dict(assign=False): an earlier call with assign=True left a mark in this state dict (its _metadata "
        f"at {into['prefix'].rstrip('.') or 'the model'}), so PyTorch would assign. The marks are now removed: call "
        "load_state_dict again, with assign=True if the tensors should become the parameters"
    )


@implements(torch.Tensor.is_meta.__get__, table=FUNCTIONS)  # type: ignore[attr-defined]
def _is_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """torch reads ``is_meta`` of each parameter before loading into it."""
    if not torch.compiler.is_compiling() and loads_state_dict():
        _unmark(load_state_dict_frames())
    return NotImplemented


@implements(torch.Tensor.requires_grad_, table=FUNCTIONS)
def _requires_grad_(func: Any, args: Any, kwargs: Any) -> Any:
    """torch calls ``requires_grad_`` on tensors that become parameters, within no_grad."""
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        _unmark(load_state_dict_frames())
    return NotImplemented


def warn_of_copy(target: torch.Tensor, source: QT) -> None:
    """Warn if load_state_dict copies a quantized tensor into a parameter of another kind, which keeps its kind."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # torch copies within no_grad
        return
    if target.is_meta or load_state_dict_frames() is None:
        return
    here = f"{_named(target)} parameters" if isinstance(target, QT) else "float parameters"
    warnings.warn(
        f"load_state_dict(assign=False) writes the values of quantized tensors ({_named(source)}) into {here}, which "
        "keep their kind; use load_state_dict(state_dict, assign=True) to load the quantized tensors unchanged",
        UserWarning,
        stacklevel=2,
    )


def _named(w: QT) -> str:
    return str(w.spec.with_(layout="plain")) + ("" if w.act is None else f" × {w.act}")
