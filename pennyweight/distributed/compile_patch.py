"""torch.compile of a model whose weights are DTensors of quantized tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compile(model: nn.Module | Callable[..., Any], *, backend: Any = "inductor", **options: Any) -> Any:
    """torch.compile without the cache of traced graphs that persists between processes.

    torch 2.13 keys a graph by mesh, placement, shape and dtype of a DTensor, but not by its inner tensor. Two schemes
    on weights of the same shape would share a graph, and the second model would compute with the scheme of the first;
    ranks with local tensors of different sizes would share one and read out of bounds. The cache is disabled only while
    this model is traced; generated code is still reused. options: those of torch.compile.
    """
    mode, settings = options.pop("mode", None), options.pop("options", None)
    if backend == "inductor":
        inner: Any = torch._TorchCompileInductorWrapper(
            mode if mode or settings else "default", settings, options.get("dynamic")
        )
    elif isinstance(backend, str):
        inner = torch._dynamo.lookup_backend(backend)
    else:
        inner = backend

    def without_cache(graph: Any, inputs: Any, **more: Any) -> Any:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return inner(graph, inputs, **more)

    return torch.compile(model, backend=without_cache, **options)
