"""Counts the operators that a model runs, by module and shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LoggingTensorMode", "_apply_logging_hook", "_fqn_to_op_to_shape_to_count"]

# module name (None outside of any) -> operator -> shapes of its tensors -> calls
_fqn_to_op_to_shape_to_count: dict[str | None, dict[str, dict[str, int]]] = {}
_current: list[str | None] = [None]


def _apply_logging_hook(model: nn.Module) -> None:
    """Make each module of ``model`` record itself as the running one when it starts. Not thread-safe."""

    def entering(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            _current[0] = name

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(entering(name))


class LoggingTensorMode(TorchDispatchMode):
    """While active, counts each operator call in ``_fqn_to_op_to_shape_to_count``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        shapes = ", ".join(str(list(arg.shape)) for arg in args if isinstance(arg, Tensor))
        ops = _fqn_to_op_to_shape_to_count.setdefault(_current[0], {})
        counts = ops.setdefault(f"{func.__module__}.{func.__name__}", {})
        counts[shapes] = counts.get(shapes, 0) + 1
        return out
