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
from .v0_8_layouts import layout_of

QT = AffineQuantizedTensor


def _qdata(w: QT) -> Tensor:
    view = find_view(w)
    return class_view.plain_codes(w) if view is None else view.take(w)["qdata"]


def _act_quant_kwargs(w: QT) -> Any:
    view = find_view(w)
    return None if view is None else view.take(w).get("act_quant_kwargs")


def _target_dtype(w: QT) -> Any:
    fmt = w.spec.format
    return fmt.code_dtype if fmt.native_float else getattr(torch, fmt.name, fmt.code_dtype)


def _activation_quantization(w: QT) -> Any:
    view = IntxUnpackedToInt8Tensor
    found = view.take(w)["activation_quantization"] if view.holds(w) else None
    return None if found is None else found.value


def _zero_point_domain(w: QT) -> ZeroPointDomain:
    if w.spec.offset is not None:
        return ZeroPointDomain.FLOAT
    return ZeroPointDomain.INT if w.spec.format.kind == "int" else ZeroPointDomain.NONE


def _original_weight_tensor(w: QT) -> QT:
    if w.act is None:
        raise AttributeError("original_weight_tensor: this weight has no activation quantization")
    return w.with_(act=None, act_scale=None, act_zero_point=None)


def _input_quant_func(w: QT) -> Any:
    for func, act in ACTIVATIONS.items():
        if act == w.act:
            return func
    raise AttributeError(f"input_quant_func: torchao has no function for {w.act}")


# Name -> value of a weight, documentation.
ATTRIBUTES: dict[str, tuple[Callable[[QT], Any], str]] = {
    "qdata": (_qdata, "The codes as stored by torchao: one per element, or two per byte where its class does so."),
    "block_size": (class_view.block_size, "Elements of each axis that share a scale."),
    "act_quant_kwargs": (_act_quant_kwargs, "The activation quantization as torchao's kwargs object, or None."),
    "act_quant_scale": (lambda w: w.act_scale, "The scale of a static activation."),
    "act_quant_zero_point": (lambda w: w.act_zero_point, "The zero point of a static activation."),
    "act_pre_scale": (lambda w: None, "torchao's pre-scale of the input: always None."),
    "reduce_range": (lambda w: w.spec.format.name == "int7", "Whether the codes have 7 bits."),
    "target_dtype": (_target_dtype, "torch's dtype of the codes."),
    "activation_quantization": (_activation_quantization, "The activation quantization by torchao's name, or None."),
    **{
        name: (lambda w, name=name: list(getattr(view_of(w), name)), "Names in a torchao file.")
        for name in ("tensor_data_names", "tensor_attribute_names", "optional_tensor_data_names",
                     "optional_tensor_attribute_names")
    },
    # torchao 0.8 to 0.17
    "quant_min": (lambda w: w.spec.format.lo, "The least code."),
    "quant_max": (lambda w: w.spec.format.hi, "The greatest code."),
    "zero_point_domain": (_zero_point_domain, "Domain of the zero point."),
    "_layout": (layout_of, "The layout torchao would use for this format on a CPU."),
    "original_weight_tensor": (_original_weight_tensor, "The weight without its activation quantization."),
    "input_quant_func": (_input_quant_func, "torchao's function for this activation quantization, if it has one."),
    "n_blocks": (lambda w: math.prod(blocks.counts(w.spec.block, w.stored_shape)), "Number of scales."),
}  # fmt: skip
for _name, (_value, _doc) in ATTRIBUTES.items():
    setattr(QT, _name, property(_value, doc=_doc))
# NF4Tensor's name of dequantize(), torchao's description of a weight in its layer's repr, and layouts of plain views.
QT.get_original_weight = lambda w: w.dequantize()  # type: ignore[attr-defined]
QT._quantization_type = lambda w: repr(w).partition("(")[2][:-1]  # type: ignore[attr-defined]
PlainView.get_layout = lambda view: layout_of(view._tensor)  # type: ignore[attr-defined]
PlainView._layout = property(PlainView.get_layout)  # type: ignore[attr-defined]
