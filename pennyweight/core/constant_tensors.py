"""Tensors that are computed once and kept: the same whatever the state of the process was at that moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made here are plain memory: no mode, transform of torch.func or inference mode has a part in them.

    A table that was made under ``torch.func.grad`` would be a tensor of that transform, and kept beyond its end. Their
    dtype and device have to be named: default ones hold here as well.
    """
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(),
        torch.inference_mode(False), torch.no_grad(),
    ):  # fmt: skip
        yield
