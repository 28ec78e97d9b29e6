"""Fallback for operations without a quantized implementation: dequantize, compute, count, warn once, or raise."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
_COUNTS: Counter[str] = Counter()
_WARNED: set[str] = set()
_STRICT: ContextVar[bool] = ContextVar("pennyweight_strict", default=False)


class FallbackWarning(UserWarning):
    """An operation ran on a dequantized copy of a quantized tensor."""


class FallbackError(RuntimeError):
    """Raised instead of :class:`FallbackWarning` under :func:`strict`."""


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within this context every fallback to a dequantized copy raises :class:`FallbackError`."""
    token = _STRICT.set(enabled)
    try:
        yield
    finally:
        _STRICT.reset(token)


def fallbacks() -> dict[str, int]:
    """How often each operation ran on a dequantized copy since the last :func:`reset_fallbacks`."""
    return dict(_COUNTS)


def reset_fallbacks() -> None:
    """Reset the counts and the record of operations already warned about."""
    _COUNTS.clear()
    _WARNED.clear()


def count(op: str) -> None:
    """Count a fallback that is a row of the kernel table. It does not warn, because ``explain`` shows it."""
    _COUNTS[op] += 1


def record(op: str, tensor: Any, returns_view: bool = False) -> None:
    """Count a fallback; warn once per op, or raise under :func:`strict`."""
    where = f"{op} on a quantized tensor {tuple(tensor.shape)} ({tensor.spec})"
    if _STRICT.get():
        raise FallbackError(
            f"{where} has no quantized implementation and strict() is on; call .dequantize() first to use a float copy"
        )
    _COUNTS[op] += 1
    if op not in _WARNED:
        _WARNED.add(op)
        if not torch.compiler.is_compiling():
            _LOG.info("fallback: %s runs on a dequantized copy", where)
        copy = " The result is a copy, not a view: writing to it does not change the weight." if returns_view else ""
        warnings.warn(f"{where} runs on a dequantized copy.{copy}", FallbackWarning, stacklevel=4)
