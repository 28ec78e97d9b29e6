"""What a deep copy of a quantized parameter is for, where that decides what it has to be."""

from __future__ import annotations

import sys


def deepcopy_for_training() -> bool:
    """Whether PEFT is copying a module to train the copy whole (``modules_to_save``).

    Codes do not learn: what a step of an optimizer changes is smaller than the distance of two of their numbers, and is
    rounded off. So that copy is float. Nothing about the call tells it but the code that it comes from.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == "peft.utils.other":
            return hasattr(frame.f_locals.get("self"), "modules_to_save")
        frame = frame.f_back  # type: ignore[assignment]
    return False
