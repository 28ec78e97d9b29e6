"""Records the operations of one call of a module, so that any part of it can be computed again with other values.

Modules without children and products with quantized weights are recorded as one operation each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..algorithms.calibration.input_hooks import COMPOSITE
from ..core.tensor import AffineQuantizedTensor
from ..planning.parameters import kind_of
from ..support.errors import Refusal

IN_PLACE = frozenset(("__iadd__", "__imul__", "__isub__", "__itruediv__", "__setitem__"))
HALF = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class Value:
    """A tensor of the recorded call.

    op        the operation that made it; None: a leaf
    name      of a leaf: the path of an argument ("position_embeddings.0") or of a parameter ("mlp.up_proj.weight")
    argument  whether it is an argument of the call
    tensor    its value in the recorded call
    """

    tensor: Tensor
    op: Op | None = None
    index: int = 0
    name: str = ""
    argument: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


@dataclass(eq=False)
class Op:
    """A call. args and kwargs contain a :class:`Value` for each tensor.

    name     of the function or the class of the module
    product  (name of the quantized weight, name of the bias or "", whether the weight is stored as [in, out])
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[Value] = field(default_factory=list)
    module: nn.Module | None = None
    path: str = ""
    product: tuple[str, str, bool] | None = None

    @property
    def inputs(self) -> list[Value]:
        """Its tensors that depend on an operation or an argument: not parameters and constants."""
        found = [v for v in _values((self.args, self.kwargs)) if v.op is not None or v.argument]
        return list(dict.fromkeys(found))


@dataclass
class Graph:
    """The operations of a call, in order. arguments: path -> value. output: as returned, with Values for tensors."""

    ops: list[Op] = field(default_factory=list)
    arguments: dict[str, Value] = field(default_factory=dict)
    output: Any = None


def _values(item: Any) -> Iterator[Value]:
    if isinstance(item, Value):
        yield item
    elif isinstance(item, (tuple, list)):
        for part in item:
            yield from _values(part)
    elif isinstance(item, Mapping):
        yield from _values(tuple(item.values()))


def tensors(item: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and mappings, with their paths."""
    if isinstance(item, Tensor):
        yield path, item
    elif isinstance(item, (tuple, list)):
        for i, part in enumerate(item):
            yield from tensors(part, f"{path}.{i}" if path else str(i))
    elif isinstance(item, Mapping):
        for key, part in item.items():
            yield from tensors(part, f"{path}.{key}" if path else str(key))


def _map(item: Any, kind: type, change: Any) -> Any:
    if isinstance(item, kind):
        return change(item)
    if isinstance(item, (tuple, list)) and not isinstance(item, torch.Size):
        parts = [_map(part, kind, change) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, dict):
        return {key: _map(part, kind, change) for key, part in item.items()}
    return item


def record(module: nn.Module, arguments: Mapping[str, Any]) -> Graph:
    """Call ``module(**arguments)`` and record it. The state of the module is not changed."""
    recorder = _Recorder(module, arguments)
    with ExitStack() as hooks, torch.no_grad():
        for path, child in module.named_modules():
            if child is not module and _atomic(child):
                hooks.enter_context(child.register_forward_pre_hook(recorder.enter, with_kwargs=True))
                leave = recorder.leave(path)
                hooks.enter_context(child.register_forward_hook(leave, with_kwargs=True))
        with recorder:
            out = type(module).forward(module, **arguments)
    recorder.graph.output = _map(out, Tensor, recorder.value)
    return recorder.graph


def _atomic(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


class _Recorder(TorchFunctionMode):
    def __init__(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.graph, self.inside = Graph(), 0
        self.thread = get_ident()  # hooks also see the calls of other threads
        self.known: dict[int, Value] = {}
        self.names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        for path, t in tensors(dict(arguments)):
            self.known[id(t)] = self.graph.arguments[path] = Value(t, name=path, argument=True)

    def value(self, t: Tensor) -> Value:
        if id(t) not in self.known:
            self.known[id(t)] = Value(t, name=self.names.get(id(t), ""))
        return self.known[id(t)]

    def add(self, op: Op, out: Any) -> None:
        for i, (_, t) in enumerate(tensors(out)):
            made = Value(t, op, i)
            op.outs.append(made)
            self.known[id(t)] = made
        if op.outs:
            self.graph.ops.append(op)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if get_ident() == self.thread:
            self.inside += 1

    def leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if get_ident() != self.thread:
                return
            self.inside -= 1
            if self.inside:
                return
            args, kwargs = _map((tuple(args), dict(kwargs)), Tensor, self.value)
            op = Op(type(module).__name__, module, args, kwargs, [], module, path, _module_product(module, path))
            self.add(op, out)

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside:
            return func(*args, **kwargs)
        if func in COMPOSITE:  # it calls other functions, with weights
            with self:
                return COMPOSITE[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        op = Op(name, func, *_map((tuple(args), dict(kwargs)), Tensor, self.value))
        out = func(*args, **kwargs)
        if func is F.linear:
            op.product = self._function_product(*args, **kwargs)
        self.add(op, out)
        return out

    def _function_product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        names = self.names.get(id(weight)), "" if bias is None else self.names.get(id(bias))
        return (*names, False) if isinstance(weight, AffineQuantizedTensor) and None not in names else None


def _module_product(module: nn.Module, path: str) -> tuple[str, str, bool] | None:
    """Of a layer that multiplies its only input by its quantized weight and adds its bias."""
    kind = kind_of(module)
    if kind is None or kind.op != "linear" or kind.params != ("weight",):
        return None
    if not isinstance(module._parameters.get("weight"), AffineQuantizedTensor) or "forward" in module.__dict__:
        return None
    return f"{path}.weight", "" if module._parameters.get("bias") is None else f"{path}.bias", kind.transposed


def replay(target: Value, given: Mapping[Value, Tensor]) -> Tensor:
    """``target`` as a function of the ``given`` values, in float32: computed by the recorded operations.

    Leaves that are not given keep their values. Raises Refusal if an operation cannot be computed again.
    """
    made: dict[Value, Tensor] = {v: t.float() for v, t in given.items()}

    def get(value: Value) -> Tensor:
        if value in made:
            return made[value]
        if value.op is None:
            t = value.tensor.detach()
            made[value] = t.float() if t.dtype in HALF else t
            return made[value]
        for out, (_, t) in zip(value.op.outs, tensors(call_again(value.op, get)), strict=True):
            made.setdefault(out, t)
        return made[value]

    with torch.no_grad():
        try:
            return get(target).float()
        except Refusal:
            raise
        except Exception as error:  # any operation of any model; the reason is shown
            raise Refusal(f"the computation of an intermediate value cannot be repeated: {error}") from error


def call_again(op: Op, get: Any) -> Any:
    args, kwargs = _map((op.args, op.kwargs), Value, get)
    args, kwargs = _map((args, kwargs), torch.dtype, lambda d: torch.float32 if d in HALF else d)
    if op.product is not None:
        raise Refusal(f"the value depends on the product with {op.product[0]}")
    if op.module is not None:
        return call_module(op.module, *args, **kwargs)
    if op.name in IN_PLACE or (op.name.endswith("_") and not op.name.endswith("__")):
        args = (args[0].clone(), *args[1:])
    return op.func(*args, **kwargs)


def call_module(module: nn.Module, *args: Any, parameters: Mapping[str, Tensor] | None = None, **kwargs: Any) -> Any:
    """module(..) for a module without children, in float32, if wanted with other parameters. Calls no hooks.

    The call is made on a copy that shares the tensors, so that other threads can use the module meanwhile.
    """
    twin: Any = copy.copy(module)
    twin._parameters = {**module._parameters, **(parameters or {})}
    twin._buffers = dict(module._buffers)
    for tensors in (twin._parameters, twin._buffers):
        for name, t in tensors.items():
            if t is not None:
                tensors[name] = t.detach().float() if t.dtype in HALF else t.detach()
    return type(module).forward(twin, *args, **kwargs)
