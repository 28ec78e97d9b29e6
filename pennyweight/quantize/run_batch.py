"""Running a model on a batch, whatever a batch is; and who called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def run_batch(model: nn.Module, batch: Any) -> Any:
    """model(batch): a mapping gives keyword arguments, a tuple or list arguments, anything else is the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def token_mask(batch: Any) -> Tensor | None:
    """bool [batch, length] of the tokens that count, where a batch says so as Hugging Face's models have it."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def user_level() -> int:
    """``stacklevel`` for a warning about what the user's own line does: of the first frame outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("pennyweight."):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
