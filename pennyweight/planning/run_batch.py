"""Runs a model on a batch of any type; finds the caller's stack level for warnings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call_site import OURS
from ..core.fallback import FallbackError
from ..support.arguments import show
from ..support.errors import ArgumentError


def run_batch(model: nn.Module, batch: Any) -> Any:
    """model(batch): a mapping becomes keyword arguments, a tuple or list arguments, anything else one argument.

    Raises ArgumentError with the layer, the shapes and a remedy if the model cannot run on the batch.
    """
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    except (FallbackError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        if _raised_by_a_check(error):
            raise
        raise ArgumentError(_why_not_run(model, batch, error)) from error


def _frames(error: BaseException) -> list[FrameType]:
    """The frames of an error, outermost first."""
    found, step = [], error.__traceback__
    while step is not None:
        found.append(step.tb_frame)
        step = step.tb_next
    return found


def _raised_by_a_check(error: BaseException) -> bool:
    """Whether a check of this package raised it, such as that of NaN in a layer's inputs, not the model."""
    last = _frames(error)[-1].f_globals.get("__name__", "")
    return last.startswith(OURS) and isinstance(error, ValueError) and not isinstance(error, ArgumentError)


def _why_not_run(model: nn.Module, batch: Any, error: Exception) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    owners: list[Any] = [frame.f_locals.get("self") for frame in _frames(error)]
    inside = [module for module in owners if id(module) in names]
    layer = inside[-1] if inside else model
    where = f" in layer {names[id(layer)]!r} ({type(layer).__name__})" if names.get(id(layer)) else ""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    said = said if len(said) <= _SAID else f"{said[:_SAID]}..."
    where = "" if " in layer " in said else where
    remedy = _remedy(model, layer, batch, error)
    return f"{type(model).__name__} cannot run on a batch of {describe(batch)}: {said}{where}; {remedy}"


_SAID = 180  # characters of the error of torch or of the model that are quoted


def describe(batch: Any) -> str:
    """The tensors of a batch: "input_ids (2, 8) torch.int64, attention_mask (2, 8) torch.int64"."""
    if isinstance(batch, Mapping):
        return ", ".join(f"{name} {_kind(x)}" for name, x in [*batch.items()][:4]) or "nothing"
    some = batch if isinstance(batch, (tuple, list)) else [batch]
    return ", ".join(map(_kind, some[:4])) or "nothing"


def _kind(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else show(x)


def _remedy(model: nn.Module, layer: nn.Module, batch: Any, error: Exception) -> str:
    """What to pass instead, as far as the model tells."""
    single = not isinstance(batch, (tuple, list, Mapping))
    given = [batch] if single else list(batch.values() if isinstance(batch, Mapping) else batch)
    if any(not isinstance(x, Tensor) for x in given) and not all(isinstance(x, (bool, type(None))) for x in given):
        return "pass tensors (torch.as_tensor)"
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.Embedding) and isinstance(weight, Tensor):
        return f"pass token ids (torch.int64) from 0 to {weight.shape[0] - 1}"
    x = next((x for x in given if isinstance(x, Tensor)), None)
    if isinstance(error, ArgumentError):  # of a quantized weight: it says what it takes
        return "check the batch"
    if isinstance(layer, nn.Linear) and isinstance(weight, Tensor) and x is not None:
        if x.dtype != weight.dtype and x.ndim and x.shape[-1] == layer.in_features:
            return f"its parameters are {weight.dtype} on {weight.device}; pass inputs of that kind"
        return f"the layer takes (..., {layer.in_features}) {weight.dtype} on {weight.device}"
    if not isinstance(error, TypeError):
        return "pass batches on which model(batch) runs"
    return f"{type(model).__name__}.forward takes {', '.join(signature(model.forward).parameters)}; pass " + (
        "a mapping with these names" if isinstance(batch, Mapping) else "a tuple of these, or a mapping"
    )


def token_mask(batch: Any) -> Tensor | None:
    """bool [batch, length] of the unpadded tokens, from the ``attention_mask`` of a Hugging Face batch; else None."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def user_level() -> int:
    """``stacklevel`` of the first frame outside this package, so that a warning points to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level
