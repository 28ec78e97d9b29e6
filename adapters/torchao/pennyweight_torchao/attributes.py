"""torchao's tensor attributes as read-only attributes of our tensors; attached when this module is imported.

``w.scale`` and ``w.zero_point`` are the class's own. The others are computed on access, from the spec and the parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.formats import HALF_INTS
from pennyweight.core.tensor import AffineQuantizedTensor, PlainView
from pennyweight.io.codecs.torchao import tensor_class
from pennyweight.io.codecs.torchao.flattened_safetensors import find_view, view_of
from pennyweight.io.codecs.torchao.int8_float8 import IntxUnpackedToInt8Tensor as _Intx
from pennyweight.io.codecs.torchao.mx import MXTensor as _MX
from pennyweight.io.codecs.torchao.nvfp4 import NVFP4Tensor as _NVFP4

from .enums import ZeroPointDomain
from .nf4 import parts as nf4
from .v0_8_aqt import ACTIVATIONS
from .v0_8_layouts import layout_of

__all__: list[str] = []  # a module of the tree that lists this file has these attributes on its tensors
QT = AffineQuantizedTensor


def _qdata(w: QT) -> Tensor:
    view = find_view(w)
    return tensor_class.plain_codes(w) if view is None else view.take(w)["qdata"]


def _piece(name: str, *views: Any) -> Callable[[QT], Any]:
    """A piece of torchao's classes MXTensor and NVFP4Tensor, or of one of them."""
    kinds = views or (_MX, _NVFP4)

    def get(w: QT) -> Any:
        view = find_view(w)
        if view not in kinds:
            names = " and ".join(v.__name__ for v in kinds)
            raise AttributeError(f"{name} is an attribute of {names}; this is {w.spec}")
        return view.take(w)[name]

    return get


def _block_size(w: QT) -> list[int] | int:
    if w.spec.format.name.startswith("nf4"):
        return nf4.block_size(w)
    view = find_view(w)
    return view.take(w)["block_size"] if view in (_MX, _NVFP4) else tensor_class.block_size(w)


def _get_hp_scales(w: QT) -> Tensor:
    """The scale of each block as float32, times the one per tensor if there is one."""
    scale = w.scale
    if scale is None:
        raise AttributeError(f"get_hp_scales: {w.spec} has no scales")
    value = scale.dequantize() if isinstance(scale, QT) else scale.float()
    return value if w.axes is None else value.permute(w.axes)


def _act_quant_kwargs(w: QT) -> Any:
    view = find_view(w)
    return None if view is None else view.take(w).get("act_quant_kwargs")


def _target_dtype(w: QT) -> Any:
    fmt = w.spec.format
    if fmt in HALF_INTS:
        return getattr(torch, f"int{fmt.bits}")
    return fmt.code_dtype if fmt.native_float else getattr(torch, fmt.name, fmt.code_dtype)


def _activation_quantization(w: QT) -> Any:
    view = _Intx
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
    "block_size": (_block_size, "Elements of each axis that share a scale; of NF4, MX and NVFP4 weights one number."),
    "act_quant_kwargs": (_act_quant_kwargs, "The activation quantization as torchao's kwargs object, or None."),
    "act_quant_scale": (lambda w: w.act_scale, "The scale of a static activation."),
    "act_quant_zero_point": (lambda w: w.act_zero_point, "The zero point of a static activation."),
    "act_pre_scale": (tensor_class.act_pre_scale_of, "The factor of each input channel (AWQ, SmoothQuant), or None."),
    "reduce_range": (lambda w: w.spec.format.name == "int7", "Whether the codes have 7 bits."),
    "target_dtype": (_target_dtype, "torch's dtype of the codes."),
    "activation_quantization": (_activation_quantization, "The activation quantization by torchao's name, or None."),
    **{
        name: (lambda w, name=name: list(getattr(view_of(w), name)), "Names in a torchao file.")
        for name in ("tensor_data_names", "tensor_attribute_names", "optional_tensor_data_names",
                     "optional_tensor_attribute_names")
    },
    # MXTensor and NVFP4Tensor
    **{
        name: (_piece(name, *views), "Of MXTensor or NVFP4Tensor.")
        for name, views in {
            "elem_dtype": (_MX,), "kernel_preference": (_MX,), "orig_dtype": (), "is_swizzled_scales": (),
            "per_tensor_scale": (_NVFP4,), "act_per_tensor_scale": (_NVFP4,),
            "use_triton_kernel": (_NVFP4,),
        }.items()
    },
    "_data": (_piece("qdata"), "qdata, before 0.13."),
    "_scale_e8m0": (_piece("scale", _MX), "The scales as float8_e8m0fnu."),
    "_scale_e4m3": (_piece("scale", _NVFP4), "The block scales as float8_e4m3fn, without the one per tensor."),
    "_per_tensor_scale": (_piece("per_tensor_scale", _NVFP4), "per_tensor_scale, before 0.13."),
    "_elem_dtype": (_piece("elem_dtype", _MX), "elem_dtype, before 0.13."),
    "_block_size": (_piece("block_size"), "block_size, before 0.13."),
    "_orig_dtype": (_piece("orig_dtype"), "orig_dtype, before 0.13."),
    "_is_swizzled_scales": (_piece("is_swizzled_scales", _NVFP4), "is_swizzled_scales, before 0.13."),
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
# torchao's description of a weight in its layer's repr, layouts of plain views, MX scales. nf4/parts.py attaches NF4's.
QT.to_dtype = lambda w, target_dtype: w.dequantize(target_dtype)  # type: ignore[attr-defined]
QT.get_hp_scales = _get_hp_scales  # type: ignore[attr-defined]
QT._quantization_type = lambda w: repr(w).partition("(")[2][:-1]  # type: ignore[attr-defined]
PlainView.get_layout = lambda view: layout_of(view._tensor)  # type: ignore[attr-defined]
PlainView._layout = property(PlainView.get_layout)  # type: ignore[attr-defined]
