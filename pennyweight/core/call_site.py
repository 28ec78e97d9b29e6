"""Who makes the current call, read from the Python stack. The only file in the package that decides by the caller.

It is the last resort: these callers need another result from an ordinary tensor function, and nothing in the call
itself differs. Libraries that call are registered from above, once they are loaded; this file names none but torch:

    torch.distributed        :func:`caller`, for pennyweight/distributed/dispatch.py
    offload to disk          :func:`refuse_disk_offload`, for the libraries in OFFLOADS
    copies to be trained     :func:`copied_for_training`, for the libraries in TRAINING_COPIES
    torch.save, torch.load   :func:`refuse_legacy_format`
    Module.load_state_dict   :func:`load_state_dict_frames`, for load_state_dict.py
    Module.to, .float() ..   :func:`converts_module`, for tensors whose own conversion to a dtype dequantizes
    messages of errors       :func:`in_layer`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn

_PACKAGE = __name__.partition(".")[0]
OURS = (f"{_PACKAGE}.", f"{_PACKAGE}_")  # modules of this package, and of distributions that extend it
_SKIPPED = (*OURS, "torch.overrides", "torch.nn.functional", "torch._tensor")
_LEGACY_FORMAT = (torch.serialization._legacy_save.__code__, torch.serialization._legacy_load.__code__)
LOAD_FROM_STATE_DICT = nn.Module._load_from_state_dict.__code__
_APPLY = nn.Module._apply.__code__
_APPLY_DEPTH = 12
_LOAD_DEPTH = 12  # torch.overrides and hooks of subclasses can be in between


@dataclass(frozen=True)
class Offload:
    """How a library offloads weights to disk.

    depth     frames from this file to the module that calls torch, at most
    message   weight -> what TypeError says, with the remedy
    """

    depth: int
    message: Callable[[Any], str]


# Name of a module -> rule; filled by pennyweight/integrations/callers.py
OFFLOADS: dict[str, Offload] = {}
TRAINING_COPIES: dict[
    str, Callable[[Mapping[str, Any]], bool]
] = {}  # (local names of its function) -> whether it is one


def _frames() -> Iterator[FrameType]:
    """The frames of the current stack, innermost first, with those of this file."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def in_layer() -> str:
    """ " in layer 'model.layers.0.q_proj' (Linear)": the innermost module whose forward makes the current call, by its
    name in the outermost one; "" outside of modules. For messages only: a quantized weight does not know its name."""
    inside = [m for m in (frame.f_locals.get("self") for frame in _frames()) if isinstance(m, nn.Module)]
    if not inside:
        return ""
    name = next((name for name, module in inside[-1].named_modules() if module is inside[0]), "")
    return f" in layer {name!r} ({type(inside[0]).__name__})" if name else f" in {type(inside[0]).__name__}"


def caller(prefixes: tuple[str, ...]) -> str:
    """The module that makes the current call if its name begins with one of the prefixes, else ""."""
    for frame in _frames():
        name = _module(frame)
        if not f"{name}.".startswith(_SKIPPED):
            return name if name.startswith(prefixes) else ""
    return ""


def refuse_disk_offload(w: Any) -> None:
    """Raise TypeError if a registered library is offloading a weight to disk, to files that can hold only floats.

    The weight would be loaded as float: as large as without quantization, and with different results if activations
    are quantized.
    """
    for module, offload in OFFLOADS.items():
        if any(_module(f) == module for f in islice(_frames(), offload.depth)):
            raise TypeError(offload.message(w))


def refuse_legacy_format() -> None:
    """Raise RuntimeError if torch writes or reads its format before 1.6, which has the numbers after the pickle.

    What a quantized tensor is made of could be neither checked nor packed when it is unpickled: its memory is not
    filled yet.
    """
    if any(f.f_code in _LEGACY_FORMAT for f in _frames()):
        raise RuntimeError(
            "torch.save(..., _use_new_zipfile_serialization=False) writes a format that cannot hold quantized tensors: "
            "torch.load fills their memory after they were made. Omit the argument, or use pennyweight.save"
        )


def converts_module() -> bool:
    """Whether a conversion of a whole module (``Module.to``, ``.bfloat16()``, ``.half()``) makes the current call: its
    quantized parameters stay quantized, and only their dtype changes."""
    return any(f.f_code is _APPLY for f in islice(_frames(), _APPLY_DEPTH))


def copied_for_training() -> bool:
    """Whether a registered library is copying a module to train the whole copy, which must then be float.

    Codes cannot be trained directly: an optimizer step is smaller than the distance between two codes and is rounded
    away.
    """
    if not TRAINING_COPIES:
        return False
    frame = next((f for f in _frames() if _module(f) in TRAINING_COPIES), None)
    return frame is not None and TRAINING_COPIES[_module(frame)](frame.f_locals)


def load_state_dict_frames() -> tuple[FrameType, FrameType] | None:
    """Frames of ``Module._load_from_state_dict`` and of ``load`` in ``Module.load_state_dict``, if the current call
    comes from there. Code that calls the former directly uses the assign mark (see load_state_dict.py) in its own way.

    torch offers no hook for it: hooks are per module, and a float model into which quantized tensors are loaded has
    none; the tensors of the state dict see only ``is_meta``, ``requires_grad_`` and ``copy_``.
    """
    into = None
    for frame in islice(_frames(), _LOAD_DEPTH):
        if frame.f_code is LOAD_FROM_STATE_DICT:
            into = frame
        elif into is not None and frame.f_code.co_name == "load" and frame.f_globals is nn.Module.__call__.__globals__:
            return into, frame
    return None


def loads_state_dict() -> bool:
    """Whether a torch function was called by ``Module._load_from_state_dict`` itself.

    To be called by a handler of that function: a fixed frame is read, no stack walked."""
    return sys._getframe(3).f_code is LOAD_FROM_STATE_DICT
