"""What fused transformer blocks and fused convolution nets share: a subclass of the module's own class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from ..core import fallback
from ..support.errors import Refusal
from .detect_changes import own_class
from .verify_block import checks_enabled


class BoundModule(Protocol):
    """What was fused, with the tensors of one module. ``module()``: that module; None if it no longer exists."""

    @property
    def module(self) -> Callable[[], nn.Module | None]: ...

    def unchanged(self, module: nn.Module) -> bool:
        """Whether it is this module, and nothing in it has changed."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output for a call of the module's forward, or the reason (str) why it is not fused."""


@dataclass(frozen=True)
class Kind:
    """What differs between fused blocks and fused nets.

    name     "block" or "net", for messages
    kernel   "block" or "chains": what runs, in reports
    refused  (module, description, args, kwargs) -> why it cannot be bound again, or ""
    bind     (module, description, args, kwargs) -> the description with the module's tensors; raises Refusal
    check    (call, module, args, kwargs) -> call(module, its class, args, kwargs), compared with the module's own
             forward; raises CheckError
    weights  module -> names of the weights that its native calls multiply
    about    module -> what runs natively, in words
    """

    name: str
    kernel: str
    refused: Callable[[Any, Any, Any, Any], str]
    bind: Callable[[Any, Any, Any, Any], BoundModule]
    check: Callable[[Callable[..., Any], Any, Any, Any], Any]
    weights: Callable[[Any], list[str]]
    about: Callable[[Any], str]


class FusedModule:
    """A module that runs as native calls. Made by :func:`fuse_`, as a subclass of the module's class.

    Calls that native code cannot take run the module's own forward, and are counted in ``pennyweight.fallbacks()`` with
    the reason.
    """

    fused_kind: ClassVar[Kind]
    thawed: type[nn.Module]  # the module's own class
    description: Any  # what was fused, without its tensors
    bound: Any = None  # a BoundModule; None: bound at the next call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cls: Any = type(self)
        if not torch.compiler.is_compiling():
            y = cls.fused_kind.check(call, self, args, kwargs) if checks_enabled() else call(self, cls, args, kwargs)
            if type(y) is not str:
                return y
            fallback.count(f"fused {cls.fused_kind.name}: {y}")
        return cls.thawed.forward(self, *args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As the original module. Tensors may be replaced."""
        type(self).bound = None
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        type(self).bound = None
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        cls = type(self)
        return (_blank, (_base(cls), cls.thawed, cls.description), *state)


def call(module: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    """The output of a call of a fused module of class ``cls``, or the reason (str) why it is not fused. Another thread
    may thaw the module meanwhile."""
    bound = cls.bound
    if bound is None or not bound.unchanged(module):
        bound = _bind_again(module, cls, args, kwargs)
        if type(bound) is str:
            return bound
    return bound.run(args, kwargs)


def _bind_again(module: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    """Bind a module that was copied or unpickled, or in which something was replaced. The reason (str) if that is
    impossible."""
    if reason := cls.fused_kind.refused(module, cls.description, args, kwargs):
        return reason
    was = cls.bound  # other threads may set it
    if was is not None and was.module() is not module:  # the class is shared by a shallow copy
        module.__class__ = cls = fused_class(_base(cls), cls.thawed, cls.description)
    try:
        bound = cls.fused_kind.bind(module, cls.description, args, kwargs)
    except Refusal as refusal:
        return str(refusal)
    cls.bound = bound
    return bound


def _base(cls: Any) -> type[FusedModule]:
    """The subclass of FusedModule of which this is the class of one module."""
    return next(c for c in cls.__mro__ if "fused_kind" in c.__dict__)


def fused_class(base: type[FusedModule], kind: type, description: Any) -> Any:
    """The class of one fused module: a subclass of ``base`` and of its own class ``kind``, so that its methods and
    registrations still apply."""
    made: Any = type(
        f"Fused{kind.__name__}",
        (base, kind),
        {"thawed": kind, "description": description, "__module__": base.__module__},
    )
    made.forward = base.forward  # a class hook of the library may have wrapped it
    return made


def fuse_class_(module: nn.Module, base: type[FusedModule], description: Any, bound: BoundModule) -> None:
    """Give a module its fused class."""
    cls = fused_class(base, own_class(module), description)
    cls.bound = bound
    module.__class__ = cls


def _blank(base: type[FusedModule], kind: type, description: Any) -> Any:
    """Unpickle: a fused module without its state."""
    cls = fused_class(base, kind, description)
    return cls.__new__(cls)
