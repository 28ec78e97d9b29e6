"""TorchAOBaseTensor: base class for your own tensors, with the common operations implemented."""

from __future__ import annotations

import functools
import hashlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._python_dispatch import return_and_correct_aliasing as _view

from pennyweight.core.tensor import AffineQuantizedTensor

from .dispatch import (
    ATEN,
    TORCH_FN,
    _dispatch__torch_dispatch__,
    _dispatch__torch_function__,
    _get_tensor_impl_constructor,
    _implements,
    _implements_torch_function,
    _register_layout,
    find,
    own,
)

__all__ = ["TorchAOBaseTensor", "_get_to_kwargs"]

aten = torch.ops.aten
COMMON_ATEN: dict[Any, Any] = {}  # handlers that classes with declared data get automatically, under __torch_dispatch__
COMMON_TORCH_FN: dict[Any, Any] = {}  # the same under __torch_function__


class _BaseTensorMeta(torch._C._TensorMeta):  # type: ignore[misc, name-defined]
    """Makes pennyweight's tensor class a virtual subclass: clients test ``isinstance(w, TorchAOBaseTensor)`` to find
    out whether a weight is quantized."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            cls is TorchAOBaseTensor and isinstance(instance, AffineQuantizedTensor)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        return super().__subclasscheck__(subclass) or (
            cls is TorchAOBaseTensor and AffineQuantizedTensor in subclass.__mro__
        )


class TorchAOBaseTensor(Tensor, metaclass=_BaseTensorMeta):
    """Base class for your own wrapper tensors.

    A subclass implements ``__new__`` (which creates the wrapper with ``torch.Tensor._make_wrapper_subclass``) and
    ``__init__``, both with their arguments in the order of these lists, and has the lists as class attributes:

    - ``tensor_data_names``, ``tensor_attribute_names``: its tensors, and its other attributes;
    - ``optional_tensor_data_names``, ``optional_tensor_attribute_names``: those that may be None.

    It then gets: flattening (``torch.compile``, export, ``state_dict``, ``deepcopy``), ``repr``, pickles in which new
    optional members may be missing, ``_apply_fn_to_data``, ``_same_metadata``, and the ops ``detach``, ``clone``,
    ``alias``, ``contiguous``, ``copy_`` and ``to``. A subclass without the lists implements these itself. Other ops are
    added by ``implements``, which also overrides the common ones; a subclass inherits its parents' handlers. An op
    without a handler raises NotImplementedError naming it.

    ``to``: an attribute named ``device`` is set to the new device. A new dtype applies to the dtype that the tensor
    reports: an attribute named ``dtype`` is set, and the data keep theirs; in a class without one, data with the dtype
    of the wrapper are converted. If the class then still reports its old dtype, ``to`` warns once and changes nothing:
    add a ``dtype`` attribute to the class, or implement ``aten._to_copy.default``.
    """

    tensor_data_names: list[str]
    tensor_attribute_names: list[str]
    optional_tensor_data_names: list[str]
    optional_tensor_attribute_names: list[str]

    implements = classmethod(_implements)
    implements_torch_function = classmethod(_implements_torch_function)
    register_layout = classmethod(_register_layout)
    get_tensor_impl_constructor = classmethod(_get_tensor_impl_constructor)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own(cls, ATEN)
        own(cls, TORCH_FN)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in COMMON_TORCH_FN and func not in find(cls, TORCH_FN) and _declares(cls):
            return COMMON_TORCH_FN[func](func, types, args, {} if kwargs is None else kwargs)
        return _dispatch__torch_function__(cls, func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in COMMON_ATEN and func not in find(cls, ATEN) and _declares(cls):
            return COMMON_ATEN[func](func, types, args, {} if kwargs is None else kwargs)
        return _dispatch__torch_dispatch__(cls, func, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the tensors present, and the attributes by name. NotImplementedError without the lists."""
        _require(self, "__tensor_flatten__")
        names = [name for name in _data_names(self) if getattr(self, name, None) is not None]
        return names, {name: getattr(self, name, None) for name in _attribute_names(self)}

    @classmethod
    def __tensor_unflatten__(
        cls, tensor_data_dict: dict[str, Tensor], tensor_attributes: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        """The inverse of :meth:`__tensor_flatten__`; optional members may be missing."""
        _require(cls, "__tensor_unflatten__")
        return _construct(cls, cls, tensor_data_dict, tensor_attributes)

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> Any:
        """A tensor like this one with ``fn`` applied to its data."""
        _require(self, "_apply_fn_to_data")
        data = {name: fn(part) for name, part in _data(self).items()}
        attributes = {name: getattr(self, name, None) for name in _attribute_names(self)}
        first = next(iter(data.values()), None)
        if first is not None and "device" in attributes and first.device != getattr(self, next(iter(data))).device:
            attributes["device"] = first.device
        return _construct(type(self), self, data, attributes)

    def _same_metadata(self, src: Any) -> bool:
        """Whether ``src`` differs from this tensor only in its values, so that ``copy_`` may copy them."""
        return _difference(self, src) is None

    def __setstate__(self, state: Any) -> None:
        torch._utils._set_obj_state(self, state)
        for name in (*_optional(self, "data"), *_optional(self, "attribute")):
            if not hasattr(self, name):
                setattr(self, name, None)

    def share_memory_(self) -> TorchAOBaseTensor:
        """Move the data to shared memory. Torch's own method uses the wrapper's storage, which does not exist."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])

    def _stable_hash_for_caching(self) -> str:
        """Cache key for torch's compiler, equal in every process: everything except the values."""
        names, context = self.__tensor_flatten__()
        held = [_hash(getattr(self, name)) for name in names]
        cls = type(self)
        return _digest([cls.__module__, cls.__qualname__, *_outside(self), names, held, context])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not _declares(self):
            return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"
        names = (*self.tensor_data_names, *self.tensor_attribute_names)
        names = (*names, *_optional(self, "data"), *_optional(self, "attribute"))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name, None)}' for name in names)})"

    def _get_to_kwargs(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _get_to_kwargs(self, *args, **kwargs)

    def get_layout(self) -> Any:
        """The ``_layout`` of classes of older releases, or None."""
        return getattr(self, "_layout", None)


class _ToKwargs(dict):  # type: ignore[type-arg]
    """``device`` and ``dtype``, which classes pass on to their constructors as keywords; ``non_blocking`` only if set,
    since no constructor accepts it, but it can always be read as a key."""

    def __missing__(self, key: str) -> Any:
        if key == "non_blocking":
            return False
        raise KeyError(key)


def _get_to_kwargs(self: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """``device``, ``dtype`` (default: the tensor's own) and ``non_blocking`` from the arguments of ``Tensor.to``. A
    layout is ignored."""
    args = tuple(arg for arg in args if not isinstance(arg, torch.layout))
    kwargs = {name: value for name, value in kwargs.items() if name != "layout"}
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
    wanted = _ToKwargs(device=device or self.device, dtype=dtype or self.dtype)
    if non_blocking:
        wanted["non_blocking"] = True
    return wanted


# -- what a class declares ---------------------------------------------------------------------------------------------


def _declares(owner: Any) -> bool:
    return hasattr(owner, "tensor_data_names") and hasattr(owner, "tensor_attribute_names")


def _require(owner: Any, what: str) -> None:
    if not _declares(owner):
        cls = owner if isinstance(owner, type) else type(owner)
        raise NotImplementedError(
            f"{cls.__name__} must implement {what}, or define tensor_data_names and tensor_attribute_names"
        )


def _optional(owner: Any, kind: str) -> list[str]:
    return getattr(owner, f"optional_tensor_{kind}_names", [])


def _data_names(owner: Any) -> list[str]:
    return [*owner.tensor_data_names, *_optional(owner, "data")]


def _attribute_names(owner: Any) -> list[str]:
    return [*owner.tensor_attribute_names, *_optional(owner, "attribute")]


def _data(w: Any) -> dict[str, Tensor]:
    """The data tensors of w, by name."""
    return {name: part for name in _data_names(w) if (part := getattr(w, name, None)) is not None}


def _construct(cls: type, owner: Any, data: dict[str, Tensor], attributes: dict[str, Any]) -> Any:
    """An instance from its members by name; required ones are passed by position, optional ones by keyword."""
    return cls(
        *(data[name] for name in owner.tensor_data_names),
        *(attributes[name] for name in owner.tensor_attribute_names),
        **{name: data.get(name) for name in _optional(owner, "data")},
        **{name: attributes.get(name) for name in _optional(owner, "attribute")},
    )


def _difference(dst: Any, src: Any) -> str | None:
    """The first difference of two tensors other than their values, as text; None if there is none.

    The device may differ, and so may the dtype of floating-point data: copying converts them.
    """
    if type(dst) is not type(src):
        return f"{type(src).__name__} is not a {type(dst).__name__}"
    if dst.shape != src.shape:
        return f"shape {tuple(src.shape)} is not {tuple(dst.shape)}"
    mine, other = _data(dst), _data(src)
    if mine.keys() != other.keys():
        return f"it holds {sorted(other)}, not {sorted(mine)}"
    for name, part in mine.items():
        if part.shape != other[name].shape:
            return f"{name} has shape {tuple(other[name].shape)}, not {tuple(part.shape)}"
        floats = part.is_floating_point() and other[name].is_floating_point()
        if part.dtype != other[name].dtype and not floats:
            return f"{name} is {other[name].dtype}, not {part.dtype}"
    for name in _attribute_names(dst):
        a, b = getattr(dst, name, None), getattr(src, name, None)
        if name not in ("device", "dtype") and a != b:
            return f"{name} is {b}, not {a}"
    return None


def _outside(x: Tensor) -> list[Any]:
    """The externally visible properties of a tensor."""
    return [tuple(x.shape), tuple(x.stride()), str(x.dtype), str(x.device), x.requires_grad]


def _hash(part: Tensor) -> Any:
    """Compiler cache key of a data tensor, including nested ones."""
    if hasattr(part, "_stable_hash_for_caching"):
        return part._stable_hash_for_caching()
    if is_traceable_wrapper_subclass(part):
        names, context = part.__tensor_flatten__()
        return [
            type(part).__qualname__,
            *_outside(part),
            names,
            [_hash(getattr(part, name)) for name in names],
            context,
        ]
    return _outside(part)


def _digest(value: Any) -> str:
    return hashlib.blake2b(pickle.dumps(value), digest_size=16).hexdigest()


# -- the common operations ---------------------------------------------------------------------------------------------


def _common(*ops: Any, table: dict[Any, Any] = COMMON_ATEN) -> Callable[[Any], Any]:
    def add(handler: Any) -> Any:
        table.update(dict.fromkeys(ops, handler))
        return handler

    return add


@_common(aten.detach.default, aten.clone.default, aten.alias.default, aten.contiguous.default)
def _map_data(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _view(func, args, kwargs, args[0]._apply_fn_to_data(lambda part: func(part, *args[1:], **kwargs)))


@_common(Tensor.contiguous, table=COMMON_TORCH_FN)
def _contiguous(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Itself if all its data are contiguous, else a clone, through autograd. Torch would check only the wrapper."""
    w = args[0]
    layout = args[1] if len(args) > 1 else kwargs.get("memory_format", torch.contiguous_format)
    if all(part.is_contiguous(memory_format=layout) for part in _data(w).values()):
        return w
    return w.clone(memory_format=layout)


@_common(aten.copy_.default)
def _copy_(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    dst, src = args[:2]
    if not _declares(dst) and type(src).dequantize is not Tensor.dequantize:
        return dst.copy_(src.dequantize(), *args[2:], **kwargs)
    difference = _difference(dst, src)
    if difference is not None:
        raise ValueError(f"{type(dst).__name__}.copy_ needs a tensor with the same metadata: {difference}")
    parts = _data(src)
    for name, part in _data(dst).items():
        part.copy_(parts[name], *args[2:], **kwargs)
    return dst


@_common(aten._to_copy.default)
def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    wanted = w._get_to_kwargs(**{k: v for k, v in kwargs.items() if k not in ("pin_memory", "memory_format")})
    device, dtype = wanted["device"], wanted["dtype"]
    names = _attribute_names(w)

    def moved(data_dtype: torch.dtype | None) -> Any:
        data = {
            name: part.to(
                device=device,
                dtype=data_dtype if part.dtype == w.dtype and part.is_floating_point() else None,
                non_blocking=wanted["non_blocking"],
                copy=True,
            )
            for name, part in _data(w).items()
        }
        attributes = {name: getattr(w, name, None) for name in names}
        attributes.update({name: wanted[name] for name in ("device", "dtype") if name in names})
        return _construct(type(w), w, data, attributes)

    if dtype == w.dtype:
        return moved(None)
    new = moved(None if "dtype" in names else dtype)
    if new.dtype != dtype:
        _warn_of_dtype(type(w))
        new = moved(None)
    return new


@functools.cache
def _warn_of_dtype(cls: type) -> None:
    warnings.warn(
        f"{cls.__name__} reports a dtype independent of its data, so .to(dtype) does not change it; "
        "add a 'dtype' attribute and constructor argument to the class, or implement aten._to_copy.default",
        stacklevel=6,
    )


@_common(aten._has_compatible_shallow_copy_type.default)
@_common(torch._has_compatible_shallow_copy_type, table=COMMON_TORCH_FN)
def _compatible(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``Module.to`` may put the new content into the old parameter."""
    return type(args[0]) is type(args[1]) and args[0].shape == args[1].shape
