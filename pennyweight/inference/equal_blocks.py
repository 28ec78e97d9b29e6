"""Descriptions of blocks that are built like one that was recognized: a model has many of the same block."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from .block_description import BlockDescription
from .detect_changes import attributes, module_classes, own_class
from .examples import Observed

_INDEX = ("layer_idx", "layer_id", "layer_index", "layer_number")  # attributes of a block or its attention
_COMPARED = ("_parameters", "_buffers", "_modules", "training")  # entries of a module that are compared apart


def described_as(
    path: str, block: nn.Module, observed: Observed, other: nn.Module, seen: Observed, description: BlockDescription
) -> BlockDescription | None:
    """The description of a block by that of another one, which was recognized in the call ``seen``.

    None if more differs than values of tensors and the index in the cache: classes, shapes, attributes, arguments.
    """
    if module_classes(block) != description.modules or not _called_alike(observed, seen):
        return None
    if not all(map(_equal_modules, block.modules(), other.modules())):
        return None
    own = tuple(attributes(block))
    if [place[:2] for place in own] != [place[:2] for place in description.attributes]:
        return None
    pairs = [(a[1], a[2], b[2]) for a, b in zip(own, description.attributes, strict=True)]
    different = [(name, a, b) for name, a, b in pairs if not _equal_values(a, b)]
    if any(name not in _INDEX or type(a) is not int or a != different[0][1] for name, a, _ in different):
        return None
    layer = description.layer
    if description.cached:
        if not different or any(b != layer for _, _, b in different):
            return None
        layer = different[0][1]
    cross = None if description.cross is None else replace(description.cross, layer=layer)
    return replace(description, name=path, layer=layer, attributes=own, cross=cross)


def _equal_modules(a: nn.Module, b: nn.Module) -> bool:
    """Whether two modules have the same tensors but for their values, and share what is no number, string or function
    (those are compared as attributes)."""
    if a._parameters.keys() != b._parameters.keys() or a._buffers.keys() != b._buffers.keys():
        return False
    tensors = [(x, y) for held in ("_parameters", "_buffers") for x, y in _pairs(getattr(a, held), getattr(b, held))]
    if not all(_equal_tensors(x, y) for x, y in tensors):
        return False
    if own_class(a) is nn.Linear:
        return True
    ours, theirs = ({k: v for k, v in m.__dict__.items() if k not in _COMPARED} for m in (a, b))
    if ours.keys() != theirs.keys():
        return False
    return all(_same_value(x, y) for x, y in _pairs(ours, theirs))


def _pairs(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(value, b[name]) for name, value in a.items()]


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, (bool, int, float, str, tuple, type(None))):
        return type(a) is type(b)  # as attributes
    if isinstance(a, (dict, set, list)) and not a and not b:  # hooks
        return True
    if type(a) is type(b) is set:  # names of buffers
        return bool(a == b)
    if type(a) is type(b) is partial:
        values = [(a.args, b.args), (tuple(a.keywords.items()), tuple(b.keywords.items()))]
        return a.func is b.func and all(_equal_values(x, y) for x, y in values)
    return a is b or getattr(a, "__func__", a) is getattr(b, "__func__", None)


def _equal_values(a: Any, b: Any) -> bool:
    """Whether they are the same object, or equal numbers, strings or tuples of them. Others count as different: tensors
    in a tuple have no == that is one bool."""
    if type(a) is type(b) is tuple:
        return len(a) == len(b) and all(map(_equal_values, a, b))
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _equal_tensors(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if isinstance(a, AffineQuantizedTensor) is not isinstance(b, AffineQuantizedTensor):
        return False
    return a.shape == b.shape and a.dtype is b.dtype and a.device == b.device


def _called_alike(observed: Observed, seen: Observed) -> bool:
    return observed.arguments.keys() == seen.arguments.keys() and all(
        _same_argument(a, b) for a, b in _pairs(observed.arguments, seen.arguments)
    )


def _same_argument(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype is b.dtype
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same_argument, a, b))
    if a is None or isinstance(a, (bool, int, float, str)):
        return _equal_values(a, b)
    return True  # caches: of the same type
