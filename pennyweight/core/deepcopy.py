"""Detects deep copies of quantized parameters that must become float because they will be trained."""

from __future__ import annotations

import sys


def deepcopy_for_training() -> bool:
    """Whether PEFT is copying a module to train the whole copy (``modules_to_save``).

    Codes cannot be trained directly: an optimizer step is smaller than the distance between two codes and is rounded
    away. So that copy is float. The call can be recognized only by its caller.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "peft.utils.other":
            return hasattr(frame.f_locals.get("self"), "modules_to_save")
        frame = frame.f_back  # type: ignore[assignment]
    return False
