"""Views: torchao's tensor classes as constructors, isinstance tests and accessors for our tensor class.

``Int8Tensor(qdata, scale, ...)`` creates a :class:`pennyweight.AffineQuantizedTensor`; ``isinstance(w, Int8Tensor)``
tests whether that class could represent w; a torchao pickle with this class loads as one of ours. Instances of a view
exist only during these conversions.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from torch import Tensor

from ...core.tensor import AffineQuantizedTensor
from .part_conversion import ready

__all__ = ["Shell", "ShellMeta", "View", "attributes"]


class ShellMeta(type(Tensor)):  # type: ignore[misc]
    """Calling the class builds another object; ``build`` is its signature."""

    def __init__(cls, name: str, bases: Any, namespace: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(name, bases, namespace)
        if "build" in namespace:
            cls.__signature__ = inspect.signature(cls.build)  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.build(*args, **kwargs)


def attributes(state: Any) -> dict[str, Any]:
    """The attributes of a pickled object by name; slots are the second element."""
    return state if isinstance(state, dict) else {**(state[0] or {}), **(state[1] or {})}


class Shell(Tensor, metaclass=ShellMeta):
    """A class whose instances exist only while torch.load reconstructs a pickled object."""

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> Any:
        """The result of calling the class."""
        raise NotImplementedError(f"{cls.__name__} cannot be built")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} was called on a {cls.__name__} during unpickling")

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(attributes(state))


class ViewMeta(ShellMeta):
    """isinstance() tests whether the view can represent a tensor."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, AffineQuantizedTensor) and instance.perm is None and cls.holds(instance)


class View(Shell, metaclass=ViewMeta):
    """Base of the views. A view defines ``holds``, ``build`` and ``take``, and torchao's names of its members:
    constructor arguments are data, attributes, optional data, optional attributes, in that order."""

    tensor_data_names: ClassVar[list[str]] = []
    tensor_attribute_names: ClassVar[list[str]] = []
    optional_tensor_data_names: ClassVar[list[str]] = []
    optional_tensor_attribute_names: ClassVar[list[str]] = []

    @staticmethod
    def holds(w: AffineQuantizedTensor) -> bool:
        """Whether this class of torchao can represent w."""
        raise NotImplementedError

    @staticmethod
    def take(w: AffineQuantizedTensor) -> dict[str, Any]:
        """torchao's members of one of our tensors, by name. Raises ValueError if it cannot represent it."""
        raise NotImplementedError

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> AffineQuantizedTensor:
        """Our tensor from the attributes of a pickled one; ``shell`` has its shape and dtype."""
        names = (*cls.tensor_data_names, *cls.tensor_attribute_names)
        more = (*cls.optional_tensor_data_names, *cls.optional_tensor_attribute_names)
        known = {n: state[n] for n in (*names, *more) if n in state}
        if "dtype" in (*names, *more):
            known.setdefault("dtype", shell.dtype)
        if "shape" in (*names, *more):
            known.setdefault("shape", tuple(shell.shape))
        return cls.build(**known)

    def __setstate__(self, state: Any) -> None:
        """torch.load created an empty tensor of this class: convert it to one of ours."""
        state = attributes(state)
        w = ready(type(self).restore(state, self))
        become(self, w)
        if state.get("_is_param"):
            self._is_param = True


def become(shell: Tensor, w: AffineQuantizedTensor) -> None:
    """Turn an empty wrapper of the same shape and dtype into w."""
    if tuple(shell.shape) != tuple(w.shape) or shell.dtype != w.dtype:
        raise ValueError(f"a pickled {tuple(shell.shape)} {shell.dtype} has parts of a {tuple(w.shape)} {w.dtype}")
    state = dict(w.__dict__)
    shell.__class__ = AffineQuantizedTensor
    shell.__dict__.update(state)
