"""Operator tables for tensor subclasses: ``implements`` fills them, the dispatchers use them.

They can be used without a base class, in a class derived from ``torch.Tensor`` itself::

    class MyTensor(torch.Tensor):
        implements = classmethod(_implements)
        __torch_function__ = classmethod(_dispatch__torch_function__)
        __torch_dispatch__ = classmethod(_dispatch__torch_dispatch__)

A handler is called as ``handler(func, types, args, kwargs)``. Each class owns two tables,
``cls._ATEN_OP_TABLE[cls]`` and ``cls._TORCH_FN_TABLE[cls]``. They start as copies of its bases' (if two bases have a
handler for the same op, the later base's wins) and are independent from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OperatorBase, OpOverload, OpOverloadPacket

__all__ = [
    "_dispatch__torch_dispatch__", "_dispatch__torch_function__", "_get_tensor_impl_constructor", "_implements",
    "_implements_torch_function", "_register_layout",
]  # fmt: skip

Handler = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
ATEN, TORCH_FN, LAYOUTS = "_ATEN_OP_TABLE", "_TORCH_FN_TABLE", "_LAYOUT_CONSTRUCTOR_TABLE"


def find(cls: type, name: str) -> dict[Any, Any]:
    """The table of that name of cls, or of its nearest base class that has one."""
    tables = getattr(cls, name, None)
    if tables is None:
        return {}
    for owner in cls.__mro__:
        if owner in tables:
            return tables[owner]
    return {}


def own(cls: type, name: str) -> dict[Any, Any]:
    """The own table of cls with that name, initialized from its bases'."""
    if name not in cls.__dict__:
        inherited: dict[Any, Any] = {}
        for base in cls.__bases__:
            inherited.update(find(base, name))
        setattr(cls, name, {cls: inherited})
    return cls.__dict__[name][cls]


def _implements(cls: type, aten_ops_or_torch_fns: Any) -> Callable[[Any], Any]:
    """Decorator: the handler of one function or of a list of them, for ``cls``.

    A function is registered where its calls arrive: an aten or custom op (all overloads, if none is named) in
    ``__torch_dispatch__``, below autograd; any other function, e.g. ``F.linear``, in ``__torch_function__``, above it.
    """

    def add(handler: Any) -> Any:
        for op in _listed(aten_ops_or_torch_fns):
            if isinstance(op, OpOverloadPacket):
                own(cls, ATEN).update({getattr(op, name): handler for name in op.overloads()})
            elif isinstance(op, OperatorBase):
                own(cls, ATEN)[op] = handler
            else:
                own(cls, TORCH_FN)[op] = handler
        return handler

    return add


def _implements_torch_function(cls: type, torch_fns: Any) -> Callable[[Any], Any]:
    """Like :func:`_implements`, above autograd. An op is intercepted there if called by name, otherwise below."""

    def add(handler: Any) -> Any:
        for fn in _listed(torch_fns):
            own(cls, TORCH_FN)[fn] = handler
            if isinstance(fn, (OperatorBase, OpOverloadPacket)):
                _implements(cls, fn)(handler)
        return handler

    return add


def _listed(ops: Any) -> list[Any]:
    return list(ops) if isinstance(ops, (list, tuple)) else [ops]


def _dispatch__torch_function__(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """``__torch_function__`` of a class with tables: the handler, else torch's default."""
    kwargs = {} if kwargs is None else kwargs
    handlers = find(cls, TORCH_FN)
    if func in handlers:
        return handlers[func](func, types, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _dispatch__torch_dispatch__(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """``__torch_dispatch__`` of a class with tables.

    A composite op without a handler (``aten.linear`` arrives whole in inference mode) is decomposed; any other raises
    NotImplementedError naming it.
    """
    kwargs = {} if kwargs is None else kwargs
    handlers = find(cls, ATEN)
    if func in handlers:
        return handlers[func](func, types, args, kwargs)
    if isinstance(func, OpOverload):
        out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
    raise unimplemented(cls, func, types, args, kwargs)


def unimplemented(cls: type, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception:
    arg_types = tuple(type(arg) for arg in args)
    kwarg_types = {name: type(arg) for name, arg in kwargs.items()}
    return NotImplementedError(
        f"{cls.__name__} has no implementation of the operator/function {func}; "
        f"register one with @{cls.__name__}.implements({func}) ({types=}, {arg_types=}, {kwarg_types=})"
    )


# -- the registry of layouts of torchao 0.8 to 0.17 --------------------------------------------------------------------


def _register_layout(tensor_class: type, layout_class: type) -> Callable[[Any], Any]:
    """Class decorator: ``TensorImpl.from_plain`` builds what ``tensor_class`` stores under ``layout_class``.

    Both classes are added to torch's safe globals for ``torch.load(weights_only=True)``.
    """

    def add(tensor_impl_class: Any) -> Any:
        own(tensor_class, LAYOUTS)[layout_class] = tensor_impl_class.from_plain
        torch.serialization.add_safe_globals([layout_class, tensor_impl_class])
        return tensor_impl_class

    return add


def _get_tensor_impl_constructor(tensor_class: type, layout_class: type) -> Callable[..., Any]:
    """The constructor registered by :func:`_register_layout`. Raises ValueError if there is none."""
    known = find(tensor_class, LAYOUTS)
    if layout_class not in known:
        names = ", ".join(sorted(layout.__name__ for layout in known)) or "none"
        raise ValueError(
            f"{tensor_class.__name__} has no tensor impl for layout {layout_class.__name__}; it has: {names}; "
            "register one with @register_layout"
        )
    return known[layout_class]
