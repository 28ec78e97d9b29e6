"""``torchao.ops``: decorators that register an operator's implementation, or its result without values.

torchao's own operators there call GPU kernels and products in packings of its C++ library; they are not served.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

__all__ = ["cached_compute_capability", "register_custom_op", "register_custom_op_impl"]


def register_custom_op(name: str) -> Callable[[Any], Any]:
    """Decorator: the function computes the shape and dtype of the operator's result, for tracing. "library::name"."""
    return torch.library.register_fake(name)


def register_custom_op_impl(name: str) -> Callable[[Any], Any]:
    """Decorator: the function becomes the operator "library::name", which changes none of its arguments."""
    return torch.library.custom_op(name, mutates_args=())


@lru_cache
def cached_compute_capability() -> int:
    """10 * major + minor of the current CUDA device. Raises what torch raises without one."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(device.major * 10 + device.minor)
