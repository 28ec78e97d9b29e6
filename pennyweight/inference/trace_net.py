"""Traces the forward of a module with torch.fx, in one thread, without a change to the module or to any class.

``torch.fx.Tracer.trace`` replaces ``nn.Module.__call__`` and ``__getattr__`` and functions in the globals of Python
modules for the whole process while it runs: another thread's calls are then recorded, or fail. Here the tracer runs
copies of the modules instead, which share their tensors. The class of a copy is a subclass of the module's own, with
the two methods of :class:`_Copy`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import partial
from types import MethodType, new_class
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from ..support.errors import Refusal
from .detect_changes import own_class


def trace(module: nn.Module) -> fx.Graph:
    """The graph of a module's own forward. Raises Refusal if torch.fx cannot trace it.

    A tensor that the forward makes without its inputs is an argument of the nodes that read it.
    """
    try:
        return _Tracer().record(module)
    except Exception as error:  # whatever a forward does with a proxy
        text = str(error).strip().splitlines()
        raise Refusal(f"torch.fx cannot trace it: {text[0] if text else type(error).__name__}") from error


class _Tracer(fx.Tracer):
    """Its inherited method ``trace`` is not used: it makes the changes to the process."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.parameter_proxies: dict[str, fx.Proxy] = {}
        self.copies: dict[int, Any] = {}  # id of a module, list or dictionary -> its copy
        self.classes: dict[type, type] = {}

    def record(self, module: nn.Module) -> fx.Graph:
        self.graph = fx.Graph()
        self.root: nn.Module = self.copy_of(module, own_class(module))
        paths = {copy: path for path, copy in self.root.named_modules()}
        self.submodule_paths = paths
        self.tensor_attrs = {
            value: f"{path}.{name}" if path else name
            for copy, path in paths.items() for name, value in copy.__dict__.items() if isinstance(value, Tensor)
        }  # fmt: skip
        forward, args = self.create_args_for_root(type(self.root).forward, True)
        self.create_node("output", "output", (self.create_arg(forward(*args)),), {})
        return self.graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = getattr(type(m), "thawed", None) is not None or isinstance(m, (nn.Conv2d, nn.Linear))
        return known or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        return forward(*args, **kwargs)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_strangers()
        return super().create_proxy(*args, **kwargs)

    def _refuse_strangers(self) -> None:
        """Raise if a module that is no part of the root makes the call, such as one in a global variable: its changes
        would not be noticed. Only modules that are a part of it have a ``__call__`` that sees this."""
        frame = sys._getframe(2)
        while frame.f_code is not _Tracer.record.__code__ and frame.f_back is not None:
            names = frame.f_code.co_varnames
            first = frame.f_locals.get(names[0]) if names else None
            if issubclass(type(first), nn.Module):
                self.path_of_module(self.copies.get(id(first), first))  # type: ignore[arg-type]
            frame = frame.f_back

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            stored = a in self.tensor_attrs or any(a is buffer for buffer in self.root.buffers())
            if not stored:  # torch.fx would make it an attribute of the root, which the user's module lacks
                return a
        return super().create_arg(a)

    # -- copies ----------------------------------------------------------------------------------------------------

    def copy_of(self, module: nn.Module, kind: type | None = None) -> Any:
        if id(module) not in self.copies:
            copy: Any = object.__new__(self._class(kind or type(module)))
            self.copies[id(module)] = copy
            # a tuple, because another thread may add an attribute meanwhile
            copy.__dict__.update({name: self._copied(value) for name, value in tuple(module.__dict__.items())})
        return self.copies[id(module)]

    def _class(self, kind: type) -> type:
        if kind not in self.classes:
            bases = (_Unannounced, _Copy) if kind is nn.Module else (_Unannounced, kind, _Copy)
            names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "pennyweight_tracer": self}
            self.classes[kind] = new_class(kind.__name__, bases, {}, lambda made: made.update(names))
        return self.classes[kind]

    def _copied(self, value: Any) -> Any:
        """An attribute of a module, with copies in place of the modules in it."""
        if isinstance(value, nn.Module):
            return self.copy_of(value)
        kind = type(value)
        if kind is list or kind is dict or kind is OrderedDict:
            if id(value) not in self.copies:
                copy: Any = kind()
                self.copies[id(value)] = copy
                if kind is list:
                    copy.extend(map(self._copied, tuple(value)))
                else:
                    copy.update({key: self._copied(part) for key, part in tuple(value.items())})
            return self.copies[id(value)]
        if kind is tuple:
            return tuple(map(self._copied, value))
        if kind is MethodType:
            return MethodType(value.__func__, self._copied(value.__self__))
        if kind is partial:  # accelerate's forward
            return partial(self._copied(value.func), *self._copied(value.args), **self._copied(value.keywords))
        return value


class _Unannounced:
    """First in the bases of a copy's class, so that no ``__init_subclass__`` of the user's class sees it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class _Copy(nn.Module):
    """Last before nn.Module in the bases of a copy's class: what the user's class defines itself comes first."""

    pennyweight_tracer: ClassVar[Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self).pennyweight_tracer.call_module(self, super().__call__, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        tracer: _Tracer = type(self).pennyweight_tracer
        return tracer.getattr(name, super().__getattr__(name), tracer.parameter_proxies)
