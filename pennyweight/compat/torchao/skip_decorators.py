"""Decorators that skip a test if the machine lacks a requirement; for unittest and pytest."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from .hardware import get_compute_capability

__all__ = [
    "skip_if_compute_capability_less_than", "skip_if_no_cuda", "skip_if_no_gemlite", "skip_if_no_xpu", "skip_if_rocm",
    "skip_if_xpu",
]  # fmt: skip


def _skip_if(condition: Callable[[], bool], reason: str) -> Callable[[Any], Any]:
    """Decorator: skips the test if the condition is true when it runs."""

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> Any:
            if condition():
                raise unittest.SkipTest(reason)
            return test(*args, **kwargs)

        return run

    return decorate


def _with_message(condition: Callable[[], bool], reason: str, message: Any) -> Any:
    """A decorator usable without parentheses, with empty ones, or with a message."""
    if callable(message):
        return _skip_if(condition, reason)(message)
    return _skip_if(condition, f"{reason}: {message}" if message else reason)


def skip_if_compute_capability_less_than(min_capability: float) -> Callable[[Any], Any]:
    return _skip_if(lambda: get_compute_capability() < min_capability, f"needs compute capability {min_capability}")


def skip_if_no_cuda() -> Callable[[Any], Any]:
    return _skip_if(lambda: not torch.cuda.is_available(), "needs CUDA")


def skip_if_no_xpu() -> Callable[[Any], Any]:
    return _skip_if(lambda: not torch.xpu.is_available(), "needs an XPU")


def skip_if_no_gemlite() -> Callable[[Any], Any]:
    return _skip_if(lambda: find_spec("gemlite") is None, "needs gemlite")


def skip_if_rocm(message: Any = None) -> Any:
    return _with_message(lambda: torch.version.hip is not None, "not under ROCm", message)


def skip_if_xpu(message: Any = None) -> Any:
    return _with_message(lambda: bool(torch.xpu.is_available()), "not on an XPU", message)
