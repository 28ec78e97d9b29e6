"""Timing, sizes, registration of operators and plain parameters for exporters, under torchao's names."""

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
    "UnwrapTensorSubclass", "_assert_and_get_unique_device", "_register_custom_op", "_register_meta_op",
    "benchmark_model", "benchmark_torch_function_in_microseconds", "ceil_div", "fill_defaults", "find_multiple",
    "get_model_size_in_bytes", "register_as_pytree_constant", "round_up", "unwrap_tensor_subclass",
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


def benchmark_torch_function_in_microseconds(f: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Mean time of ``f(*args, **kwargs)`` in microseconds, by torch's blocked timer, after two calls to warm up."""
    from torch.utils import benchmark

    f(*args, **kwargs)
    f(*args, **kwargs)
    timer = benchmark.Timer(stmt="f(*args, **kwargs)", globals={"f": f, "args": args, "kwargs": kwargs})
    return timer.blocked_autorange().mean * 1e6


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


# -- operators ---------------------------------------------------------------------------------------------------------


def fill_defaults(args: Sequence[Any], n: int, defaults_tail: Sequence[Any]) -> list[Any]:
    """``args`` filled up to n from ``defaults_tail``, the defaults of the last arguments.

    For ``__torch_dispatch__`` handlers, where arguments with default values may be missing. Raises RuntimeError if an
    argument without a default is missing.
    """
    missing = n - len(args)
    if missing > len(defaults_tail):
        raise RuntimeError(f"got {len(args)} of {n} arguments, and only the last {len(defaults_tail)} have defaults")
    return [*args, *(defaults_tail[len(defaults_tail) - missing :] if missing > 0 else ())]


def _register_custom_op(lib: Any, inductor_decomposed: bool = True) -> Callable[[Any], Any]:
    """Decorator that makes a function with annotated arguments an op of ``lib``, named as it without its first "_".

    ``torch.export`` keeps the op whole. With ``inductor_decomposed`` inductor traces through it; without, it stays
    whole there too, and needs :func:`_register_meta_op`.
    """
    key = "CompositeImplicitAutograd" if inductor_decomposed else "CompositeExplicitAutograd"

    def add(fn: Any) -> Any:
        from torch._inductor.decomposition import register_decomposition
        from torch.library import infer_schema

        name = fn.__name__.removeprefix("_")
        if not name.isidentifier():
            raise ValueError(
                f"an op is named after its function, and {fn.__name__!r} is not a valid name; use def, not lambda"
            )
        lib.define(name + infer_schema(fn, mutates_args=()))
        lib.impl(name, fn, key)
        op = getattr(getattr(torch.ops, lib.ns), name)
        if inductor_decomposed:
            register_decomposition([op])(fn)
        return op

    return add


def _register_meta_op(lib: Any, op_name: str) -> Callable[[Any], Any]:
    """Decorator: the meta implementation of the op ``op_name`` of ``lib``."""

    def add(fn: Any) -> Any:
        lib.impl(op_name, fn, "Meta")
        return fn

    return add


def register_as_pytree_constant(cls: type) -> type:
    """Class decorator: torch's tracers treat instances as constants, compared by ``==``."""
    torch.utils._pytree.register_constant(cls)
    return cls


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
