"""Stores tensor-subclass weights as plain parameters, rebuilt at each use: for exporters and runtimes that support
only plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["UnwrapTensorSubclass", "unwrap_tensor_subclass"]


class UnwrapTensorSubclass(nn.Module):
    """Parametrization that stores the plain tensors inside a subclass and computes the subclass from them.

    Nested subclasses are unwrapped too. ``rebuild_stack`` lists, in unwrapping order, what to build: (type, context of
    ``__tensor_flatten__``, names of the inner tensors, size, stride, which inner ones are subclasses themselves).
    """

    rebuild_stack: list[tuple[type, Any, list[str], torch.Size, tuple[int, ...], list[bool]]]

    def right_inverse(self, tensor: Tensor) -> list[Tensor]:
        """The plain tensors inside. Raises TypeError for a tensor that is already plain."""
        if not is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"only tensor subclasses with __tensor_flatten__ can be unwrapped, got {type(tensor).__name__}"
            )
        self.rebuild_stack = []
        plain: list[Tensor] = []
        self._open(tensor, plain)
        return plain

    def _open(self, tensor: Any, plain: list[Tensor]) -> None:
        names, context = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        nested = [is_traceable_wrapper_subclass(part) for part in parts]
        self.rebuild_stack.append((type(tensor), context, names, tensor.size(), tensor.stride(), nested))
        for part, opens in zip(parts, nested, strict=True):
            if opens:
                self._open(part, plain)
            else:
                plain.append(part)

    def forward(self, *tensors: Tensor) -> Tensor:
        """The subclass from the plain tensors, in the order of :meth:`right_inverse`."""
        return self._close(iter(self.rebuild_stack), iter(tensors))

    def _close(self, stack: Any, plain: Any) -> Tensor:
        cls, context, names, size, stride, nested = next(stack)
        inner = {
            name: self._close(stack, plain) if opens else next(plain) for name, opens in zip(names, nested, strict=True)
        }
        return cls.__tensor_unflatten__(inner, context, size, stride)  # type: ignore[attr-defined]


def unwrap_tensor_subclass(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> nn.Module:
    """Store plain tensors in place of every parameter that is a tensor subclass; the model's results do not change.

    In place, and returned. All modules are visited, the root included, or those for which ``filter_fn(module, name)``
    is true. State dicts then have keys such as ``linear.parametrizations.weight.original0``. Unwrapped weights no
    longer train. Sharded (DTensor) and already parametrized parameters are skipped.

    ``torch.export`` supports the result if the class handles its functions above autograd, as ours does. A class that
    handles only aten ops can be exported directly, without this: torch 2.13 cannot trace such tensors created inside.
    """
    sharded: tuple[type, ...] = ()
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        sharded = (DTensor,)
    for fqn, module in list(model.named_modules()):
        if filter_fn is not None and not filter_fn(module, fqn):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, sharded):
                # the parts become parameters like the whole, and integer parts cannot require gradients
                setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
                parametrize.register_parametrization(module, name, UnwrapTensorSubclass())
    return model
