"""torchao's safetensors: state dicts of quantized weights as plain tensors and metadata, and back.

``layer.weight`` becomes ``layer._weight_qdata``, ``layer._weight_scale`` ..., and its metadata is JSON:
``{"_type": class, "_data": {attribute: value}, "_tensor_data_names": [...]}``, which torchao 0.14 and later read.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....core.formats import E4M3, E5M2
from ....core.spec import DTYPES
from ....core.tensor import AffineQuantizedTensor
from ....planning import granularity
from ....planning.granularity import Granularity, MappingType
from . import enums
from .enums import Float8MMConfig, KernelPreference, ScaleCalculationMode
from .int4 import Int4OpaqueTensor, Int4Tensor
from .int8_float8 import (
    Float8Tensor,
    Int8Tensor,
    IntxUnpackedToInt8Tensor,
    IntxUnpackedToInt8TensorActivationQuantization,
    QuantizeTensorKwargs,
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)
from .mx import SUPPORTED_ELEM_DTYPES, MXTensor, QuantizeTensorToMXKwargs
from .nvfp4 import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
from .tensor_class import ready

# -- classes in a file -------------------------------------------------------------------------------------------------

FILE_VIEWS: tuple[Any, ...] = (
    Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Int4OpaqueTensor, Float8Tensor, MXTensor, NVFP4Tensor,
)  # fmt: skip


def find_view(w: AffineQuantizedTensor) -> Any:
    """The first view that can represent w, or None."""
    return next((view for view in FILE_VIEWS if view.represents(w)), None)


def _find_file_view(w: AffineQuantizedTensor) -> Any:
    """As :func:`find_view`, for files: pieces of a transposed tensor, packed along another axis, cannot be written."""
    view = find_view(w)
    return None if view in (MXTensor, NVFP4Tensor) and w.axes is not None else view


def view_of(w: AffineQuantizedTensor) -> Any:
    """The first view that can represent w. Raises ValueError naming the spec if torchao has no class for it."""
    view = _find_file_view(w)
    if view is None:
        raise ValueError(
            f"torchao has no tensor class for {w.spec.with_(layout='plain')} of shape {tuple(w.shape)}"
            + ("" if w.act is None else f" with activation {w.act}")
            + ("" if w.perm is None else " with permuted channels")
            + ("" if w.pre_scale is None else " with a pre_scale")
            + ("" if w.axes is None else ", transposed")
            + "; save it with pennyweight.save"
        )
    return view


# -- attributes in a file ----------------------------------------------------------------------------------------------

_FLOATS = tuple(DTYPES.values())
_INTS = tuple(getattr(torch, f"int{n}") for n in range(1, 9))
_FLOAT8 = (E4M3.code_dtype, E5M2.code_dtype)
_MAX_SIZE = (1 << 31) - 1
_PER_TOKEN = IntxUnpackedToInt8TensorActivationQuantization

Test = Callable[[Any], bool]


def _size(v: Any) -> bool:
    return type(v) is int and (v == -1 or 0 < v <= _MAX_SIZE)


def _sizes(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and all(_size(n) for n in v)


def _one_of(*values: Any) -> Test:
    return lambda v: any(type(v) is type(known) and v == known for known in values)


def _is(*kinds: type) -> Test:
    return lambda v: type(v) in kinds or (isinstance(v, kinds) and type(v) not in (bool, str))


# name: (expected value, as text; check)
_ATTRIBUTES: dict[str, tuple[str, Test]] = {
    "block_size": ("a positive size, or a list of them", lambda v: _size(v) or _sizes(v)),
    "group_size": ("a positive size", _size),
    "shape": ("a list of sizes", _sizes),
    "axis": ("an integer", _is(int)),
    "dim": ("an integer", _is(int)),
    "dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "orig_dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "activation_dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "target_dtype": ("torch.int1 to torch.int8", _one_of(*_INTS)),
    "float8_dtype": ("a float8 dtype", _one_of(*_FLOAT8)),
    "elem_dtype": ("an element of MX", _one_of(*SUPPORTED_ELEM_DTYPES)),
    "act_quant_kwargs": ("how an activation is quantized", _is(QuantizeTensorKwargs)),
    "granularity": ("a granularity", _is(Granularity)),
    "mapping_type": ("a MappingType", _is(MappingType)),
    "act_mapping_type": ("a MappingType", _is(MappingType)),
    "scaling_mode": ("a ScaleCalculationMode", _is(ScaleCalculationMode)),
    "kernel_preference": ("a KernelPreference", _is(KernelPreference)),
    "mm_config": ("a Float8MMConfig", _is(Float8MMConfig)),
    "activation_quantization": ("a name", lambda v: isinstance(v, (str, _PER_TOKEN))),
    "hp_value_lb": ("a number", _is(int, float)),
    "hp_value_ub": ("a number", _is(int, float)),
    **dict.fromkeys(
        ("reduce_range", "is_swizzled_scales", "use_triton_kernel", "use_dynamic_per_tensor_scale", "emulate",
         "use_fast_accum", "pad_inner_dim"),
        ("true or false", _is(bool)),
    ),
}  # fmt: skip
# Attributes that may be null
_NEVER_NULL = (
    "block_size", "group_size", "shape", "dtype", "target_dtype", "elem_dtype", "orig_dtype", "granularity",
    "mapping_type",
)  # fmt: skip


def check_attributes(kind: str, attributes: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid attribute; null is checked by the class."""
    for name, value in attributes.items():
        if name not in _ATTRIBUTES or (value is None and name not in _NEVER_NULL):
            continue
        if value is None and kind == "Float8Tensor":
            continue  # a block follows from the scale's shape
        what, right = _ATTRIBUTES[name]
        if not right(value):
            raise ValueError(f"{kind}.{name} must be {what}, got {str(value)[:60]!r}")


# -- state dicts -------------------------------------------------------------------------------------------------------

ALLOWED_TENSORS_SUBCLASSES = [view.__name__ for view in FILE_VIEWS]
_PLAIN = {
    cls.__name__: cls
    for cls in (
        QuantizeTensorToFloat8Kwargs, QuantizeTensorToMXKwargs,
        QuantizeTensorToNVFP4Kwargs, QuantizeTensorToInt8Kwargs,
        IntxUnpackedToInt8TensorActivationQuantization, enums.Float8MMConfig, enums.KernelPreference,
        enums.ScaleCalculationMode, granularity.MappingType, granularity.PerAxis, granularity.PerBlock,
        granularity.PerGroup, granularity.PerRow, granularity.PerTensor, granularity.PerToken,
    )
}  # fmt: skip
ALLOWED_CLASSES: dict[str, Any] = {**{view.__name__: view for view in FILE_VIEWS}, **_PLAIN}
_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class TensorSubclassAttributeJSONEncoder(json.JSONEncoder):
    """Encodes our quantized weights and their attribute values."""

    def default(self, o: Any) -> Any:
        if isinstance(o, AffineQuantizedTensor):
            view = view_of(o)
            return _described(view, view.take(o))
        return _encode(o)


def _described(view: Any, taken: dict[str, Any]) -> dict[str, Any]:
    data = (*view.optional_tensor_data_names, *view.tensor_data_names)
    attributes = (*view.optional_tensor_attribute_names, *view.tensor_attribute_names)
    return {
        "_type": view.__name__,
        "_data": {name: _encode(taken[name]) for name in attributes},
        "_tensor_data_names": [name for name in data if taken[name] is not None],
    }


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.dtype):
        return {"_type": "torch.dtype", "_data": str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        # torchao compares this one with its string, and its table lacks the enum's name.
        if isinstance(value, IntxUnpackedToInt8TensorActivationQuantization):
            return value.value
        return {"_type": type(value).__name__, "_data": value.name}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"_type": type(value).__name__, "_data": {k: _encode(v) for k, v in value._asdict().items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"_type": type(value).__name__, "_data": fields}
    if isinstance(value, (list, tuple)):
        return [_encode(v) for v in value]
    raise TypeError(f"{value!r} cannot be written to a torchao file")


def object_from_dict(data: Any) -> Any:
    """Build an object from its description. Only names in a fixed table are allowed; ValueError for others."""
    if not isinstance(data, dict):
        raise TypeError(f"Expected dictionary, got {type(data)}")
    if "_type" not in data or "_data" not in data:
        raise ValueError("Input dictionary missing required '_type' or '_data' fields")
    kind, held = data["_type"], data["_data"]
    if kind == "torch.dtype":
        if not isinstance(held, str) or held not in _DTYPES:
            raise ValueError(f"unknown dtype {str(held)[:60]!r}")
        return _DTYPES[held]
    cls = ALLOWED_CLASSES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(
            f"Failed to find class {str(kind)[:60]} in any of the allowed modules: {', '.join(ALLOWED_CLASSES)}"
        )
    if issubclass(cls, enum.Enum):
        if not isinstance(held, str) or held not in cls.__members__:
            raise ValueError(f"{kind} has no member {str(held)[:60]!r}; it has {', '.join(cls.__members__)}")
        return cls[held]
    if not isinstance(held, dict):
        raise ValueError(f"{kind} is described by an object, got {str(held)[:60]!r}")
    decoded = {k: v if isinstance(v, Tensor) else _decode(v) for k, v in held.items()}
    check_attributes(kind, {k: v for k, v in decoded.items() if not isinstance(v, Tensor)})
    try:
        return cls(**decoded)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"Failed to create instance of {kind}: {error}") from error


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return object_from_dict(value) if "_type" in value else {k: _decode(v) for k, v in value.items()}
    return [_decode(v) for v in value] if isinstance(value, list) else value


def _prefix(name: str) -> str:
    module, _, param = name.rpartition(".")
    return f"{module}._{param}_" if module else f"_{param}_"


def flatten_tensor_state_dict(tensors_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(plain tensors, metadata) of a state dict, for ``safetensors.torch.save_file``.

    Raises ValueError, naming the tensor, for a format without a torchao class: save it with pennyweight.save.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for name, tensor in tensors_dict.items():
        if isinstance(tensor, AffineQuantizedTensor):
            try:
                view = view_of(tensor)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            taken = view.take(tensor)
            described = _described(view, taken)
            for part in described["_tensor_data_names"]:
                tensors[_prefix(name) + part] = taken[part].detach().clone().contiguous()
            metadata[name] = json.dumps(described)
        elif type(tensor) in (Tensor, torch.nn.Parameter):
            tensors[name] = tensor.detach()
            metadata[name] = json.dumps({"_type": "Tensor"})
        else:
            raise ValueError(f"{name}: Unsupported tensor type: {type(tensor)}")
    metadata["tensor_names"] = json.dumps(list(tensors_dict))
    return tensors, metadata


def unflatten_tensor_state_dict(
    tensors_data_dict: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(state dict, remaining tensors) from plain tensors and metadata. A weight with missing parts, as when files are
    loaded one by one, remains. Raises ValueError for metadata that is not torchao's."""
    if "tensor_names" not in metadata:
        raise ValueError("No tensors found")
    left = dict(tensors_data_dict)
    found: dict[str, Tensor] = {}
    for name in json.loads(metadata["tensor_names"]):
        try:
            described = json.loads(metadata[name])
            kind = described["_type"]
            parts = [] if kind == "Tensor" else list(described["_tensor_data_names"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: the metadata does not describe it: {error!r}") from error
        if kind == "Tensor":
            if name in left:
                found[name] = left.pop(name)
            continue
        if kind not in ALLOWED_TENSORS_SUBCLASSES:
            raise ValueError(f"{name}: Unsupported tensor type: {kind}")
        if any(_prefix(name) + part not in left for part in parts):
            continue
        pieces = {part: left.pop(_prefix(name) + part) for part in parts}
        try:
            found[name] = ready(object_from_dict({"_type": kind, "_data": {**described["_data"], **pieces}}))
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{name}: {error}") from error
    return found, left


def is_metadata_torchao(metadata: Mapping[str, Any] | None) -> bool:
    """Whether metadata of a file describes tensors in this form."""
    if not metadata or "tensor_names" not in metadata:
        return False
    try:
        names = json.loads(metadata["tensor_names"])
        kinds = [json.loads(metadata[name]).get("_type") for name in names]
    except (TypeError, KeyError, AttributeError, ValueError):
        return False
    return (
        bool(kinds) and isinstance(names, list) and all(k == "Tensor" or k in ALLOWED_TENSORS_SUBCLASSES for k in kinds)
    )
