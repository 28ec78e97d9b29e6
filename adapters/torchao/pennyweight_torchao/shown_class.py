"""repr of quantized weights under torchao's names: the class that the current release has for such a weight.

In a process with :func:`pennyweight_torchao.install`, ``repr(w)`` begins with ``Int8Tensor(`` and ``print(model)``
shows that, as people and log parsers expect from torchao; the rest of the text stays ours. ``type(w)`` and
``w.__class__`` stay ``AffineQuantizedTensor`` everywhere: pickles, dispatch and subclass checks of torch use them, and
one class cannot be several. Without the alias the repr names our class.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.torchao.flattened_safetensors import find_view

from .nf4.tensor import NF4Tensor

_OURS = AffineQuantizedTensor.__repr__


def class_name(w: AffineQuantizedTensor) -> str:
    """Name of torchao's class for a weight; "AffineQuantizedTensor", the older releases' class, where none fits."""
    view = find_view(w)
    if view is None and isinstance(w, NF4Tensor):  # has no form in torchao's files
        view = NF4Tensor
    return AffineQuantizedTensor.__name__ if view is None else view.__name__


@wraps(_OURS)
def _named(self: AffineQuantizedTensor, **options: Any) -> str:
    return class_name(self) + _OURS(self, **options).removeprefix(AffineQuantizedTensor.__name__)


def show() -> None:
    """Let reprs name torchao's classes."""
    AffineQuantizedTensor.__repr__ = _named  # type: ignore[method-assign]


def hide() -> None:
    """Undo :func:`show`."""
    AffineQuantizedTensor.__repr__ = _OURS  # type: ignore[method-assign]
