"""Cached constant tensors, independent of the modes and transforms active when they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors created within this context are plain: not affected by modes, torch.func transforms or inference mode.

    Otherwise a cached table created under ``torch.func.grad`` would be a tensor of that transform and outlive it.
    Specify dtype and device explicitly: changed defaults apply here too.
    """
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(),
        torch.inference_mode(False), torch.no_grad(),
    ):  # fmt: skip
        yield
