"""Runs a model on a batch of any type; finds the caller's stack level for warnings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def run_batch(model: nn.Module, batch: Any) -> Any:
    """model(batch): a mapping becomes keyword arguments, a tuple or list arguments, anything else one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def token_mask(batch: Any) -> Tensor | None:
    """bool [batch, length] of the unpadded tokens, from the ``attention_mask`` of a Hugging Face batch; else None."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def user_level() -> int:
    """``stacklevel`` of the first frame outside this package, so that a warning points to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pennyweight."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
