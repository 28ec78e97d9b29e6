"""Views: torchao's tensor classes as ways to build, recognize and take apart the one class of ours.

``Int8Tensor(qdata, scale, ...)`` makes a :class:`pennyweight.AffineQuantizedTensor`; ``isinstance(w, Int8Tensor)`` asks
whether w holds what that class holds; a pickle of torchao's that names the class becomes one of ours when it is loaded.
No object of a view ever stays around.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor

from ...core.tensor import AffineQuantizedTensor
from .part_conversion import ready

__all__ = ["Shell", "ShellMeta", "View", "attributes"]


class ShellMeta(type(Tensor)):  # type: ignore[misc]
    """Calls of the class build something else; ``build`` is its signature."""

    def __init__(cls, name: str, bases: Any, namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace)
        if "build" in namespace:
            cls.__signature__ = inspect.signature(cls.build)  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.build(*args, **kwargs)


def attributes(state: Any) -> dict[str, Any]:
    """What a pickle holds of an object, by name; attributes that are slots come second."""
    return state if isinstance(state, dict) else {**(state[0] or {}), **(state[1] or {})}


class Shell(Tensor, metaclass=ShellMeta):
    """A class whose objects are there while torch.load puts together what a pickle names, and no longer."""

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> Any:
        """What a call gives."""
        raise NotImplementedError(f"{cls.__name__} cannot be built")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"a {cls.__name__} that is being unpickled met {func}")

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(attributes(state))


class ViewMeta(ShellMeta):
    """isinstance() recognizes what a view holds."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, AffineQuantizedTensor) and instance.perm is None and cls.holds(instance)


class View(Shell, metaclass=ViewMeta):
    """Base of the views. A view gives ``holds``, ``build`` and ``take``, and the names of what it is made of, which are
    torchao's: constructor arguments are data, attributes, optional data, optional attributes, in that order."""

    tensor_data_names: ClassVar[list[str]] = []
    tensor_attribute_names: ClassVar[list[str]] = []
    optional_tensor_data_names: ClassVar[list[str]] = []
    optional_tensor_attribute_names: ClassVar[list[str]] = []

    @staticmethod
    def holds(w: AffineQuantizedTensor) -> bool:
        """Whether w is what this class of torchao can hold."""
        raise NotImplementedError

    @staticmethod
    def take(w: AffineQuantizedTensor) -> dict[str, Any]:
        """torchao's pieces of one of ours, by name. Raises ValueError where it has none for it."""
        raise NotImplementedError

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> AffineQuantizedTensor:
        """One of ours from the attributes of a pickled one; ``shell`` has its shape and dtype."""
        names = (*cls.tensor_data_names, *cls.tensor_attribute_names)
        more = (*cls.optional_tensor_data_names, *cls.optional_tensor_attribute_names)
        known = {n: state[n] for n in (*names, *more) if n in state}
        if "dtype" in (*names, *more):
            known.setdefault("dtype", shell.dtype)
        if "shape" in (*names, *more):
            known.setdefault("shape", tuple(shell.shape))
        return cls.build(**known)

    def __setstate__(self, state: Any) -> None:
        """torch.load has made an empty tensor of this class: become one of ours."""
        state = attributes(state)
        w = ready(type(self).restore(state, self))
        become(self, w)
        if state.get("_is_param"):
            self._is_param = True


def become(shell: Tensor, w: AffineQuantizedTensor) -> None:
    """Make an empty wrapper of the same shape and dtype be w."""
    if tuple(shell.shape) != tuple(w.shape) or shell.dtype != w.dtype:
        raise ValueError(f"a pickled {tuple(shell.shape)} {shell.dtype} has parts of a {tuple(w.shape)} {w.dtype}")
    state = dict(w.__dict__)
    shell.__class__ = AffineQuantizedTensor
    shell.__dict__.update(state)
