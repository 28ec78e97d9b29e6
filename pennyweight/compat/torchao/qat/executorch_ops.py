"""torchao._executorch_ops: torch's ``quantized_decomposed`` ops, which ExecuTorch lowers, by torchao's names.

Importing torch's module registers the ops. Arguments and results are those of torch.ops.quantized_decomposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_OPS = (
    "quantize_per_channel_group", "choose_qparams_per_token_asymmetric", "dequantize_per_channel_group",
    "quantize_per_token", "dequantize_per_token",
)  # fmt: skip


def _wrapper(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch.ao.quantization.fx._decomposed  # registers the ops

        return getattr(torch.ops.quantized_decomposed, name)(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"_quantized_decomposed_{name}_wrapper"
    call.__doc__ = f"torch.ops.quantized_decomposed.{name}."
    return call


_WRAPPERS = {f"_quantized_decomposed_{name}_wrapper": _wrapper(name) for name in _OPS}
globals().update(_WRAPPERS)
__all__ = sorted(_WRAPPERS)  # noqa: PLE0605 - from a table
