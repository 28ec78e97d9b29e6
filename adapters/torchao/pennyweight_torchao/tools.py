"""Timing, sizes and plain parameters for exporters, under torchao's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "UnwrapTensorSubclass", "_assert_and_get_unique_device", "benchmark_model", "ceil_div", "find_multiple",
    "get_model_size_in_bytes", "round_up", "unwrap_tensor_subclass",
]  # fmt: skip

# -- measuring ---------------------------------------------------------------------------------------------------------


def _assert_and_get_unique_device(module: nn.Module) -> torch.device | None:
    """The device of all parameters and buffers; None if there are none. Raises AssertionError for several."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    if len(devices) > 1:
        raise AssertionError(f"expected a module on one device, but its tensors are on {sorted(map(str, devices))}")
    return devices.pop() if devices else None


def benchmark_model(
    model: Callable[..., Any], num_runs: int, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None,
    device_type: str | None = None,
) -> float:  # fmt: skip
    """Mean time of one call of ``model(*args, **kwargs)``, in milliseconds on every device.

    The device is synchronized only at the start and the end. There is no warm-up: call the model first if it is
    compiled. ``device_type`` ("cpu", "cuda") defaults to that of the module. Raises ValueError for less than one run,
    and TypeError for a function without ``device_type``.
    """
    if num_runs < 1:
        raise ValueError(f"num_runs must be at least 1, got {num_runs}")
    if device_type is None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"pass device_type, 'cpu' or 'cuda', to time a {type(model).__name__}")
        device = _assert_and_get_unique_device(model)
        device_type = "cpu" if device is None else device.type
    wait = torch.get_device_module(device_type).synchronize
    kwargs = kwargs or {}
    wait()
    start = time.perf_counter()
    for _ in range(num_runs):
        with torch.autograd.profiler.record_function("timed region"):
            model(*args, **kwargs)
    wait()
    return (time.perf_counter() - start) * 1e3 / num_runs


# -- sizes -------------------------------------------------------------------------------------------------------------


def get_model_size_in_bytes(model: nn.Module, ignore_embeddings: bool = False) -> int:
    """Bytes of all parameters and buffers; tensor subclasses count by their stored data.

    The model's own are counted like those of its submodules, tied tensors once. ``ignore_embeddings`` excludes tensors
    that only ``nn.Embedding`` modules contain.
    """
    seen: dict[int, Tensor] = {}
    for module in model.modules():
        if not (ignore_embeddings and isinstance(module, nn.Embedding)):
            for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                seen[id(x)] = x
    return sum(part.numel() * part.element_size() for x in seen.values() for part in _stored(x))


def _stored(x: Any) -> Iterator[Tensor]:
    """The plain tensors inside."""
    if is_traceable_wrapper_subclass(x):
        for name in x.__tensor_flatten__()[0]:
            yield from _stored(getattr(x, name))
    else:
        yield x


def find_multiple(n: int, *args: int) -> int:
    """The smallest number >= n that all of ``args`` divide."""
    return round_up(n, lcm(*args))


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up."""
    return (a + b - 1) // b


def round_up(a: int, b: int) -> int:
    """The smallest multiple of b that is >= a."""
    return ceil_div(a, b) * b


# -- tensor subclasses as plain parameters -----------------------------------------------------------------------------


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
