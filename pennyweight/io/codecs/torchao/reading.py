"""Reads torchao checkpoints for pw.open: flattened safetensors, and pickles if allowed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....core import blocks
from ....core.tensor import AffineQuantizedTensor
from ....planning import granularity
from ...checkpoint import Checkpoint
from ...file import CheckpointError
from ...lazy_checkpoint import Opened, StoredTensor
from ...safetensors_file import DTYPE_NAMES, Entry
from ...state_dict import describe, identity, pack
from ...strict_json import parse
from . import affine_quantized, enums, int4, int8_float8, mx, nf4, nvfp4
from .flattened_safetensors import unflatten_tensor_state_dict

# -- names in torch.load files -----------------------------------------------------------------------------------------

_Q = "quantization"
_W = f"{_Q}.quantize_.workflows"


def _at(homes: str, source: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", getattr(source, name)


def _in(homes: str, *names: str) -> Iterator[tuple[str, Any]]:
    """Layouts and tensor impls."""
    known = {**affine_quantized.LAYOUTS, **affine_quantized.IMPLS}
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", known[name]


# Name in a pickle, below "torchao" -> its counterpart here.
GLOBALS: dict[str, Any] = dict(
    (
        *_at(f"{_Q} {_W} {_W}.int8.int8_tensor", int8_float8, "Int8Tensor", "QuantizeTensorToInt8Kwargs"),
        *_at(f"{_Q} {_W} {_W}.intx.intx_unpacked_to_int8_tensor", int8_float8, "IntxUnpackedToInt8Tensor",
             "IntxUnpackedToInt8TensorActivationQuantization"),
        *_at(f"{_Q} {_W} {_W}.int4.int4_tensor", int4, "Int4Tensor"),
        *_at(f"prototype.quantization.int4 prototype.quantization.int4.int4_opaque_tensor {_Q} {_W} "
             f"{_W}.int4.int4_opaque_tensor", int4, "Int4OpaqueTensor"),
        *_at(f"{_Q} {_W} {_W}.float8.float8_tensor", int8_float8, "Float8Tensor", "QuantizeTensorToFloat8Kwargs"),
        *_at(f"{_Q} {_W}.nf4.nf4_tensor dtypes dtypes.nf4tensor", nf4, "NF4Tensor"),
        *_at("prototype.mx_formats.mx_tensor", mx, "MXTensor", "QuantizeTensorToMXKwargs"),
        *_at("prototype.mx_formats.nvfp4_tensor", nvfp4, "NVFP4Tensor", "QuantizeTensorToNVFP4Kwargs"),
        *_at("prototype.mx_formats.nvfp4_tensor prototype.mx_formats", enums, "NVFP4MMConfig"),
        *_at("prototype.mx_formats.config prototype.mx_formats.mx_tensor", enums, "ScaleCalculationMode",
             "MXGemmKernelChoice"),
        *_at("dtypes dtypes.affine_quantized_tensor", affine_quantized, "AffineQuantizedTensor"),
        *_at(f"{_Q} {_Q}.linear_activation_quantized_tensor", affine_quantized, "LinearActivationQuantizedTensor"),
        *_at(f"{_Q}.quant_api", affine_quantized, "_int8_asymm_per_token_quant",
             "_int8_symm_per_token_reduced_range_quant"),
        *_in("dtypes.utils dtypes", "PlainLayout"),
        *_in("dtypes.uintx.plain_layout dtypes.affine_quantized_tensor", "PlainAQTTensorImpl"),
        *_in("dtypes.uintx.q_dq_layout", "QDQLayout", "QDQTensorImpl"),
        *_in("dtypes.uintx.uintx_layout", "UintxLayout", "UintxAQTTensorImpl"),
        *_at("dtypes.uintx.uintx_layout", affine_quantized, "UintxTensor"),
        *_in("dtypes.uintx.int4_cpu_layout", "Int4CPULayout", "Int4CPUAQTTensorImpl"),
        *_in("dtypes.uintx.tensor_core_tiled_layout", "TensorCoreTiledLayout", "TensorCoreTiledAQTTensorImpl"),
        *_in("dtypes.floatx.float8_layout", "Float8Layout", "Float8AQTTensorImpl"),
        *_at(f"{_Q}.granularity {_Q}", granularity, "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor",
             "PerToken"),
        *_at(f"{_Q}.quant_primitives {_Q}", enums, "ZeroPointDomain"),
        *_at(f"{_Q}.quantize_.common.kernel_preference {_Q}.quantize_.common", enums, "KernelPreference"),
        *_at("float8.inference", enums, "Float8MMConfig"),
        (f"{_Q}.quant_primitives.MappingType", granularity.MappingType),
        (f"{_Q}.MappingType", granularity.MappingType),
    )
)  # fmt: skip
SAFE_GLOBALS = [(value, f"torchao.{path}") for path, value in GLOBALS.items()]


# -- checkpoints -------------------------------------------------------------------------------------------------------

FORMAT = "torchao"
_MAX_TEXT, _MAX_DEPTH = 1 << 16, 16  # limits for the description of one tensor; real ones have about 500 bytes


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
        if not stored.endswith(("_scale", "_zero_point")) or stored.endswith("_act_pre_scale") or piece.numel() == 1:
            continue  # activations and per-tensor scales have one number
        if [n for n in piece.shape if n != 1] != [n for n in counts if n != 1]:
            raise ValueError(f"{stored} is {list(piece.shape)}, expected {list(counts)}")


def _checked(path: str, name: str, w: Tensor) -> Tensor:
    """Validate a quantized tensor."""
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
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
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
