"""Reads torchao checkpoints for pw.open: flattened safetensors, and pickles if allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.tensor import AffineQuantizedTensor
from ...io.checkpoint import Checkpoint
from ...io.file import CheckpointError
from ...io.lazy_checkpoint import Opened, StoredTensor
from ...io.safetensors_file import DTYPE_NAMES, Entry
from ...io.state_dict import describe, identity, pack
from ...io.strict_json import parse
from ...planning import granularity
from . import attributes, enums, int4_views, int8_float8_views, v0_8_aqt, v0_8_layouts
from .float8_training import products, tensor_0_9, training_tensor
from .low_bit_optim import state_4bit, state_8bit, state_fp8
from .mx import mx_tensor, nvfp4_tensor
from .nf4 import tensor as nf4_tensor
from .pre_scaled import PreScaledTensor
from .quantized_training import configs, weights
from .safetensors_state import unflatten_tensor_state_dict

# -- names in torch.load files -----------------------------------------------------------------------------------------

_Q = "quantization"
_W = f"{_Q}.quantize_.workflows"


def _at(homes: str, source: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", getattr(source, name)


# Name in a pickle, below "torchao" -> its counterpart here.
GLOBALS: dict[str, Any] = dict(
    (
        *_at(f"{_Q} {_W} {_W}.int8.int8_tensor", int8_float8_views, "Int8Tensor", "QuantizeTensorToInt8Kwargs"),
        *_at(f"{_Q} {_W} {_W}.intx.intx_unpacked_to_int8_tensor", int8_float8_views, "IntxUnpackedToInt8Tensor",
             "IntxUnpackedToInt8TensorActivationQuantization"),
        *_at(f"{_Q} {_W} {_W}.int4.int4_tensor", int4_views, "Int4Tensor"),
        *_at(f"prototype.quantization.int4 prototype.quantization.int4.int4_opaque_tensor {_Q} {_W} "
             f"{_W}.int4.int4_opaque_tensor", int4_views, "Int4OpaqueTensor"),
        *_at(f"{_Q} {_W} {_W}.float8.float8_tensor", int8_float8_views, "Float8Tensor", "QuantizeTensorToFloat8Kwargs"),
        *_at(f"{_Q} {_W}.nf4.nf4_tensor dtypes dtypes.nf4tensor", nf4_tensor, "NF4Tensor"),
        *_at("prototype.mx_formats.mx_tensor", mx_tensor, "MXTensor", "QuantizeTensorToMXKwargs"),
        *_at("prototype.mx_formats.nvfp4_tensor", nvfp4_tensor, "NVFP4Tensor", "QuantizeTensorToNVFP4Kwargs"),
        *_at("prototype.mx_formats.nvfp4_tensor prototype.mx_formats", enums, "NVFP4MMConfig"),
        *_at("prototype.mx_formats.config prototype.mx_formats.mx_tensor", enums, "ScaleCalculationMode",
             "MXGemmKernelChoice"),
        *_at("dtypes dtypes.affine_quantized_tensor", v0_8_aqt, "AffineQuantizedTensor"),
        *_at(f"{_Q} {_Q}.linear_activation_quantized_tensor", v0_8_aqt, "LinearActivationQuantizedTensor"),
        *_at(f"{_Q}.quant_api", v0_8_aqt, "_int8_asymm_per_token_quant", "_int8_symm_per_token_reduced_range_quant"),
        *_at("dtypes.utils dtypes", v0_8_layouts, "PlainLayout"),
        *_at("dtypes.uintx.plain_layout dtypes.affine_quantized_tensor", v0_8_layouts, "PlainAQTTensorImpl"),
        *_at("dtypes.uintx.q_dq_layout", v0_8_layouts, "QDQLayout", "QDQTensorImpl"),
        *_at("dtypes.uintx.uintx_layout", v0_8_layouts, "UintxLayout", "UintxAQTTensorImpl", "UintxTensor"),
        *_at("dtypes.uintx.int4_cpu_layout", v0_8_layouts, "Int4CPULayout", "Int4CPUAQTTensorImpl"),
        *_at("dtypes.uintx.tensor_core_tiled_layout", v0_8_layouts, "TensorCoreTiledLayout",
             "TensorCoreTiledAQTTensorImpl"),
        *_at("dtypes.floatx.float8_layout", v0_8_layouts, "Float8Layout", "Float8AQTTensorImpl"),
        *_at(f"{_Q}.granularity {_Q}", granularity, "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor",
             "PerToken"),
        *_at(f"{_Q}.quant_primitives {_Q}", enums, "ZeroPointDomain"),
        *_at(f"{_Q}.quantize_.common.kernel_preference {_Q}.quantize_.common", enums, "KernelPreference"),
        *_at("float8.inference", enums, "Float8MMConfig"),
        *_at("float8 float8.float8_training_tensor", training_tensor, "Float8TrainingTensor"),
        *_at("float8 float8.float8_training_tensor float8.float8_tensor", products, "GemmInputRole", "LinearMMConfig",
             "ScaledMMConfig"),
        *_at("float8.float8_tensor", tensor_0_9, "Float8Tensor"),
        *_at("prototype.quantized_training.int8", weights, "Int8QuantizedTrainingLinearWeight"),
        *_at("prototype.quantized_training.bitnet", weights, "BitNetTrainingLinearWeight",
             "BitNetPacked2bitLinearWeight"),
        *_at("prototype.quantized_training.int8_mixed_precision", weights, "Int8MixedPrecisionTrainingLinearWeight"),
        *_at("prototype.quantized_training.int8_mixed_precision", configs, "Int8MixedPrecisionTrainingConfig"),
        *_at("optim.subclass_8bit prototype.low_bit_optim.subclass_8bit", state_8bit, "OptimState8bit"),
        *_at("optim.subclass_4bit prototype.low_bit_optim.subclass_4bit", state_4bit, "OptimState4bit"),
        *_at("optim.subclass_fp8 prototype.low_bit_optim.subclass_fp8", state_fp8, "OptimStateFp8"),
        (f"{_Q}.quant_primitives.MappingType", granularity.MappingType),
        (f"{_Q}.MappingType", granularity.MappingType),
    )
)  # fmt: skip


def allow(name: str) -> None:
    """Allow these names in torch.load(weights_only=True), under the name of the library."""
    assert attributes.ATTRIBUTES  # loaded tensors have torchao's attributes
    torch.serialization.add_safe_globals([(value, f"{name}.{path}") for path, value in GLOBALS.items()])


# -- checkpoints -------------------------------------------------------------------------------------------------------

FORMAT = "torchao"
_MAX_TEXT, _MAX_DEPTH = 1 << 16, 16  # limits for the description of one tensor; real ones have about 500 bytes
_PICKLES = ("torchao", "pennyweight.compat.torchao")  # the names under which their classes were imported


def open_safetensors(c: Checkpoint, config: Mapping[str, Any] | None) -> Opened:
    """torchao's flattened form. The spec of a weight depends on its zero points, so each is read once.

    Raises CheckpointError.
    """
    described: dict[str, str] = {}
    for file in c.files:  # transformers writes the whole of it into every file
        described |= {name: text for name, text in file.metadata.items() if name not in ("tensor_names", "format")}
    parts = {name: _parts(c, name, text) for name, text in described.items()}
    owner: dict[str, str] = {}
    for name, stored in parts.items():
        for part in stored:
            if owner.setdefault(part, name) != name or stored.count(part) > 1:
                raise CheckpointError(c.path, name, f"part {part} also belongs to {owner[part]}")
    held = {name: _flattened(c, name, described[name], stored) for name, stored in parts.items()}
    left = sorted(c.where.keys() - owner.keys())
    if left:
        raise CheckpointError(c.path, left[0], "belongs to no tensor described in the metadata")
    return Opened(c.path, FORMAT, held, c.paths, c.close, {}, {}, config)


def _parts(c: Checkpoint, name: str, text: str) -> tuple[str, ...]:
    """Stored names of a tensor."""
    try:
        data = parse(text.encode("utf-8", "surrogatepass"), max_bytes=_MAX_TEXT, max_depth=_MAX_DEPTH, floats=True)
        if not isinstance(data, dict) or not isinstance(data.get("_type"), str):
            raise ValueError("expected an object with _type")
        kind, parts = data["_type"], data.get("_tensor_data_names", [])
        if not isinstance(parts, list) or not all(isinstance(p, str) for p in parts):
            raise ValueError("_tensor_data_names must be a list of names")
        if not isinstance(data.get("_data", {}), dict):
            raise ValueError("_data must be an object")
    except ValueError as e:
        raise CheckpointError(c.path, name, f"its metadata does not describe a tensor: {e}") from e
    module, _, param = name.rpartition(".")
    prefix = f"{module}._{param}_" if module else f"_{param}_"
    stored = (name,) if kind == "Tensor" else tuple(prefix + p for p in parts)
    missing = [s for s in stored if s not in c.where]
    if missing:
        raise CheckpointError(c.path, name, f"part {missing[0]} is missing")
    return stored


def _flattened(c: Checkpoint, name: str, text: str, stored: tuple[str, ...]) -> StoredTensor:
    def read() -> Tensor:
        metadata = {"tensor_names": json.dumps([name]), name: text}
        pieces = {s: c.tensor(s) for s in stored}
        try:
            found, _ = unflatten_tensor_state_dict(pieces, metadata)
            _check_shapes(name, json.loads(text), pieces, found[name])
        except CheckpointError:
            raise
        except Exception as e:  # torch raises various errors for inconsistent parts
            raise CheckpointError(c.path, name, str(e).removeprefix(f"{name}: ")[:500] or type(e).__name__) from e
        return _checked(c.path, name, found[name])

    nbytes = sum(c.entry(s).end - c.entry(s).begin for s in stored)
    return _held(name, read(), nbytes, read)


def _check_shapes(name: str, described: Mapping[str, Any], pieces: Mapping[str, Tensor], w: Tensor) -> None:
    """Raise ValueError for a scale or zero point with the right number of elements in the wrong shape.

    Axes of size one are ignored, since torchao adds and removes them; so are swizzled scales.
    """
    kind = described["_type"]
    if not isinstance(w, AffineQuantizedTensor) or described["_data"].get("is_swizzled_scales"):
        return
    counts = blocks.counts(w.spec.block, w.shape)
    if kind == "Int4Tensor":
        counts = counts[::-1]
    for stored, piece in pieces.items():
        if not stored.endswith(("_scale", "_zero_point")) or piece.numel() == 1:
            continue  # activations and per-tensor scales have one number
        if [n for n in piece.shape if n != 1] != [n for n in counts if n != 1]:
            raise ValueError(f"{stored} is {list(piece.shape)}, expected {list(counts)}")


def _checked(path: str, name: str, w: Tensor) -> Tensor:
    """Validate a quantized tensor."""
    if isinstance(w, PreScaledTensor):
        raise CheckpointError(
            path, name, "its input is scaled first (act_pre_scale of AWQ or SmoothQuant), which pennyweight's files "
            "do not hold; load it with torchao's unflatten_tensor_state_dict or torch.load, and load_state_dict"
        )  # fmt: skip
    if isinstance(w, AffineQuantizedTensor):
        try:
            pack(name, w, describe(name, w))
        except CheckpointError as e:
            raise CheckpointError(path, e.tensor, e.reason.removeprefix("cannot be stored: ")) from e
    return w


def _held(name: str, w: Tensor, nbytes: int, read: Any) -> StoredTensor:
    if isinstance(w, AffineQuantizedTensor):
        return StoredTensor(describe(name, w), nbytes, read)
    return StoredTensor(Entry(w.dtype, tuple(w.shape), 0, nbytes), nbytes, read)


def open_pickle(path: str, mmap: bool = True) -> Opened:
    """A torch.save file with a state dict of floats or torchao's tensors; torch.load(weights_only=True).

    Raises CheckpointError for any error of torch as well.
    """
    for name in _PICKLES:
        allow(name)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as e:  # torch raises various errors for an invalid file
        raise CheckpointError(path, None, f"torch.load(weights_only=True): {str(e)[:300]}") from e
    if not isinstance(state, Mapping) or not all(isinstance(k, str) for k in state):
        raise CheckpointError(path, None, f"contains a {type(state).__name__}, not a state dict of tensors")
    held: dict[str, StoredTensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, w in state.items():
        if not isinstance(w, Tensor) or (not isinstance(w, AffineQuantizedTensor) and w.dtype not in DTYPE_NAMES):
            raise CheckpointError(path, name, f"is a {type(w).__name__}, which is not a supported tensor")
        key = identity(w)
        other = name if key is None else first.setdefault(key, name)
        if other != name:
            aliases[name] = other
            continue
        w = _checked(path, name, w.detach())
        held[name] = _held(name, w, w.nbytes, lambda w=w: w)
    return Opened(path, "torch", held, (os.path.realpath(path),), lambda: None, aliases)
