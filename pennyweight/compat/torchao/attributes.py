"""torchao's tensor attributes as read-only attributes of our tensors; attached when this module is imported.

``w.scale`` and ``w.zero_point`` are the class's own. The others are computed on access, from the spec and the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.tensor import AffineQuantizedTensor, PlainView
from . import class_view
from .enums import ZeroPointDomain
from .int8_float8_views import IntxUnpackedToInt8Tensor
from .safetensors_state import find_view, view_of
from .v0_8_aqt import ACTIVATIONS
from .v0_8_layouts import Layout, layout_of

__all__ = ["ATTRIBUTES"]

QT = AffineQuantizedTensor
ATTRIBUTES: dict[str, Callable[[QT], Any]] = {}


def _attribute(fn: Callable[[QT], Any]) -> Callable[[QT], Any]:
    ATTRIBUTES[fn.__name__] = fn
    return fn


@_attribute
def qdata(w: QT) -> Tensor:
    """The codes as stored by torchao: one per element, or two per byte where torchao's class does so."""
    view = find_view(w)
    return class_view.plain_codes(w) if view is None else view.take(w)["qdata"]


@_attribute
def block_size(w: QT) -> Any:
    """Elements of each axis that share a scale."""
    return class_view.block_size(w)


@_attribute
def act_quant_kwargs(w: QT) -> Any:
    """The activation quantization as torchao's kwargs object; None if there is none."""
    view = find_view(w)
    return None if view is None else view.take(w).get("act_quant_kwargs")


@_attribute
def act_quant_scale(w: QT) -> Any:
    """The scale of a static activation."""
    return w.act_scale


@_attribute
def act_quant_zero_point(w: QT) -> Any:
    """The zero point of a static activation."""
    return w.act_zero_point


@_attribute
def act_pre_scale(w: QT) -> None:
    """torchao's pre-scale of the input: always None."""
    return None


@_attribute
def reduce_range(w: QT) -> bool:
    return w.spec.format.name == "int7"


@_attribute
def target_dtype(w: QT) -> Any:
    """torch's dtype of the codes."""
    fmt = w.spec.format
    return fmt.code_dtype if fmt.native_float else getattr(torch, fmt.name, fmt.code_dtype)


@_attribute
def activation_quantization(w: QT) -> Any:
    view = IntxUnpackedToInt8Tensor
    return view.take(w)["activation_quantization"] if view.holds(w) else None


@_attribute
def tensor_data_names(w: QT) -> list[str]:
    """Names of the data tensors in a torchao file."""
    return list(view_of(w).tensor_data_names)


@_attribute
def tensor_attribute_names(w: QT) -> list[str]:
    return list(view_of(w).tensor_attribute_names)


@_attribute
def optional_tensor_data_names(w: QT) -> list[str]:
    return list(view_of(w).optional_tensor_data_names)


@_attribute
def optional_tensor_attribute_names(w: QT) -> list[str]:
    return list(view_of(w).optional_tensor_attribute_names)


# -- torchao 0.8 to 0.17 ---------------------------------------------------------------------------------------------


@_attribute
def quant_min(w: QT) -> Any:
    return w.spec.format.lo


@_attribute
def quant_max(w: QT) -> Any:
    return w.spec.format.hi


@_attribute
def zero_point_domain(w: QT) -> ZeroPointDomain:
    if w.spec.offset is not None:
        return ZeroPointDomain.FLOAT
    return ZeroPointDomain.INT if w.spec.format.kind == "int" else ZeroPointDomain.NONE


@_attribute
def _layout(w: QT) -> Layout:
    return layout_of(w)


@_attribute
def original_weight_tensor(w: QT) -> QT:
    """The weight without its activation quantization."""
    if w.act is None:
        raise AttributeError("original_weight_tensor: this weight has no activation quantization")
    return w.with_(act=None, act_scale=None, act_zero_point=None)


@_attribute
def input_quant_func(w: QT) -> Any:
    """torchao's function for this activation quantization, if it has one."""
    for func, act in ACTIVATIONS.items():
        if act == w.act:
            return func
    raise AttributeError(f"input_quant_func: torchao has no function for {w.act}")


@_attribute
def n_blocks(w: QT) -> int:
    """Number of scales."""
    return math.prod(blocks.counts(w.spec.block, w.stored_shape))


for _name, _fn in ATTRIBUTES.items():
    setattr(QT, _name, property(_fn))


def _get_original_weight(self: QT) -> Tensor:
    """NF4Tensor's name of dequantize()."""
    return self.dequantize()


QT.get_original_weight = _get_original_weight  # type: ignore[attr-defined]


def _quantization_type(self: QT) -> str:
    """torchao's description of a weight in its layer's repr."""
    return repr(self).partition("(")[2][:-1]


QT._quantization_type = _quantization_type  # type: ignore[attr-defined]


def _get_layout(self: PlainView) -> Layout:
    return layout_of(self._tensor)


PlainView.get_layout = _get_layout  # type: ignore[attr-defined]
PlainView._layout = property(_get_layout)  # type: ignore[attr-defined]
