"""Graph break for unevenly sharded layers whose ranks communicate to choose scales: inductor orders operations by size
and drops empty ones, so ranks would communicate in different orders.

Imported only while tracing, because torch.compiler.disable imports the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="the layer is sharded unevenly, and its ranks communicate to choose a scale of the whole matrix; "
    "shard it evenly, or use a recipe with row or block scales"
)
def call_outside_graph(run: Callable[..., Any], *args: Any) -> Any:
    """run(*args), in eager mode."""
    return run(*args)
