"""Runs a model for an algorithm. Products in bfloat16 and float16 are computed in float32 on processors without
instructions for them, where torch's own take 4 to 10 times as long."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...planning import run_batch as plain

ROWS = 32  # of an input: for fewer the conversion of the weight takes longer than the product
_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip


def run_batch(model: nn.Module, batch: Any) -> Any:
    """:func:`pennyweight.planning.run_batch.run_batch`, with :func:`products_in_float32`."""
    with products_in_float32(model.parameters()):
        return plain.run_batch(model, batch)


def products_in_float32(parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """For a model with these parameters. Inside, products of plain tensors in a dtype that this processor has no
    instructions for are computed in float32 and rounded once, gradients too. Tensors on other devices and quantized
    ones are not concerned, nor are few rows."""
    slow = slow_dtypes()
    concerned = any(p.dtype in slow and p.device.type == "cpu" for p in parameters)
    return _Float32Products(slow) if concerned else nullcontext()


@lru_cache(maxsize=1)
def slow_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes whose products torch emulates on this processor; none where that is not known (not x86)."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    fp16 = torch.cpu._is_amx_fp16_supported()
    found = [dtype for dtype, fast in ((torch.bfloat16, bf16), (torch.float16, fp16)) if not fast]
    return frozenset(found)


class _Float32Products(TorchDispatchMode):
    """Below the modes that watch which weights a model multiplies by: they see the model's own tensors."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or types:
            return func(*args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]  # a mask is in kwargs
        dtype = given[0].dtype
        rows = min(x.numel() // max(1, x.shape[-1]) for x in given if x.ndim > 1)
        if dtype not in self.dtypes or rows < ROWS or any(x.device.type != "cpu" or x.dtype != dtype for x in given):
            return func(*args, **kwargs)  # also what torch refuses
        out = func(*map(_wide, args), **{name: _wide(x) for name, x in kwargs.items()})
        return out.to(dtype) if isinstance(out, Tensor) else (out[0].to(dtype), *out[1:])


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) else x
