"""``torchao._executorch_ops``: functions that call torch's ``quantized_decomposed`` operators."""

from __future__ import annotations

from typing import Any

import torch

_NAMES = (
    "choose_qparams_per_token_asymmetric", "dequantize_per_channel_group", "dequantize_per_token",
    "quantize_per_channel_group", "quantize_per_token",
)  # fmt: skip
__all__ = [f"_quantized_decomposed_{name}_wrapper" for name in _NAMES]


def _wrapper(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        from torch.ao.quantization.fx import _decomposed  # noqa: F401 - defines the operators

        return getattr(torch.ops.quantized_decomposed, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"_quantized_decomposed_{name}_wrapper"
    call.__doc__ = f"``torch.ops.quantized_decomposed.{name}``."
    return call


globals().update({f"_quantized_decomposed_{name}_wrapper": _wrapper(name) for name in _NAMES})
