"""Layers whose ranks have parts of different sizes, and exchange what scales are chosen from: inductor orders what it
schedules by size, or drops what is empty, and ranks would exchange in different orders.

Imported while tracing only, because torch.compiler.disable brings the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="ranks have parts of different sizes of a layer, and exchange what the scale of the whole is chosen from; "
    "cut it evenly, or take a recipe whose scales are of rows or blocks"
)
def call_outside_graph(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args), in eager mode."""
    return run(*args)


__all__ = ["call_outside_graph"]
