"""Manifest of a native file: its quantized tensors, and the stored tensors they imply. See docs/format.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..core import blocks
from ..core.codebook import DTYPE as TABLE_DTYPE
from ..core.packing import flat_rows, saved_by_flat_rows, stream_shape
from ..core.qparams import RULES
from ..core.spec import DTYPES, ActivationSpec, QuantSpec, check_keys, dtype_name
from .file import KeyedError
from .safetensors_file import MAX_AXES, check_name, size_of
from .strict_json import parse

KEY = "pennyweight"  # the one key of a file's __metadata__ used by this library
VERSION = 5  # newest readable version; files declare the oldest sufficient one, see version_of
MAX_MANIFEST_BYTES = 32 << 20
MAX_MANIFEST_DEPTH = 16  # three nested specs take 6
# Every suffix that can follow "<tensor>." in a file. Frozen: readers of version 1 know exactly these.
PART_NAMES = ("codes", "scale", "zero_point", "offset", "act_scale", "act_zero_point")
PART_NAMES_2 = (*PART_NAMES, "perm")
PART_NAMES_3 = (*PART_NAMES_2, "table")
PART_NAMES_5 = (*PART_NAMES_3, "pre_scale")
GUARD = (torch.uint8, (0,))
_FLAGS = {1: {"signed_scale"}, 2: {"signed_scale", "perm"}, 3: {"signed_scale", "perm"}}  # boolean keys of a tensor
_FLAGS[4] = _FLAGS[3] | {"guard", "flat"}
_FLAGS[5] = _FLAGS[4] | {"pre_scale"}

Stored = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Meta:
    """Description of one quantized tensor in a file; the spec has no layout.

    signed_scale  scales may be negative
    perm          the contracted axis is stored permuted; the permutation is a stored part
    guard         an empty tensor, uint8 [0], is stored under the tensor's own name. A loader that matches names and
                  does not know the format then finds another shape and raises, instead of leaving the model's weight
                  as it was initialized
    pre_scale     entries of the contracted axis have a factor, by which products scale their input; a stored part
    flat          codes, and zero points with their own format, are one bit stream per entry of the first stored axis
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    act: ActivationSpec | None = None
    axes: tuple[int, ...] | None = None
    signed_scale: bool = False
    perm: bool = False
    guard: bool = False
    flat: bool = False
    pre_scale: bool = False

    def for_writing(self) -> Meta:
        """As this release writes it: with a guard, and flat where that saves bytes."""
        shape = self.stored_shape
        flat = len(shape) > 2 and saved_by_flat_rows(self.spec.codes_shape(shape), self.spec.format.bits)
        return replace(self, guard=shape != GUARD[1], flat=flat)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in stored axis order, the contracted axis last."""
        if self.axes is None:
            return self.shape
        return tuple(self.shape[self.axes.index(i)] for i in range(len(self.axes)))


@dataclass(frozen=True)
class Manifest:
    """Quantized tensors of a file by name, and tied names: alias -> stored name."""

    tensors: dict[str, Meta] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def version_of(manifest: Manifest) -> int:
    """The version declared for this manifest: the first that supports all of its contents."""
    metas = manifest.tensors.values()
    if any(meta.pre_scale for meta in metas):
        return 5
    if any(meta.guard or meta.flat for meta in metas):
        return 4
    if any(meta.spec.version > 1 or (meta.act is not None and meta.act.spec.version > 1) for meta in metas):
        return 3
    return 2 if any(meta.perm for meta in metas) else 1


def stored_parts(name: str, meta: Meta) -> Stored:
    """Stored parts of a quantized tensor, dtype and shape: codes, scale, zero_point, offset, act_*, perm, pre_scale,
    guard, in order.

    Codes below 8 bits are a bit stream: uint8 [.., ceil(n * bits / 8)], each row of the last axis (``flat``: of all
    axes but the first) padded to a whole byte. Zero points with their own format are stored the same way.
    """
    out = _value_parts(name, meta.spec, meta.stored_shape, meta.flat)
    if meta.act is not None and meta.act.mode == "static":
        out[f"{name}.act_scale"] = (torch.float32, (1,))
        if meta.act.spec.zero_point:
            out[f"{name}.act_zero_point"] = (meta.act.spec.zero_point_dtype, (1,))
    if meta.perm:
        out[f"{name}.perm"] = (torch.int32, meta.stored_shape[-1:])
    if meta.pre_scale:
        out[f"{name}.pre_scale"] = (torch.float32, meta.stored_shape[-1:])
    if meta.guard:
        out[name] = GUARD
    return out


def _value_parts(name: str, spec: QuantSpec, shape: tuple[int, ...], flat: bool = False) -> Stored:
    out = {f"{name}.codes": codes_stored(spec, shape, flat)}
    part_shape = blocks.counts(spec.block, shape)
    for slot, kind in spec.part_specs().items():
        if isinstance(kind, QuantSpec):
            out |= _value_parts(f"{name}.{slot}", kind, part_shape)
        elif slot == "zero_point" and spec.zero_point_bits < 8 and part_shape:
            size = flat_rows(part_shape) if flat else part_shape
            out[f"{name}.{slot}"] = (torch.uint8, stream_shape(size, spec.zero_point_bits))
        else:
            out[f"{name}.{slot}"] = (kind, part_shape)
    if spec.table_shape is not None:
        out[f"{name}.table"] = (TABLE_DTYPE, spec.table_shape)
    return out


def codes_stored(spec: QuantSpec, shape: tuple[int, ...], flat: bool) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype and shape of the stored codes."""
    padded, bits = spec.codes_shape(shape), spec.format.bits
    if bits == 8:
        return spec.format.code_dtype, padded
    return torch.uint8, stream_shape(flat_rows(padded) if flat else padded, bits)


def dump(manifest: Manifest) -> str:
    """The manifest as JSON; deterministic."""
    tensors = {}
    for name, meta in manifest.tensors.items():
        data: dict[str, Any] = {"spec": meta.spec.to_dict(), "shape": list(meta.shape), "dtype": dtype_name(meta.dtype)}
        if meta.act is not None:
            data["act"] = meta.act.to_dict()
        if meta.axes is not None:
            data["axes"] = list(meta.axes)
        if meta.signed_scale:
            data["signed_scale"] = True
        data |= {key: True for key in ("perm", "guard", "flat", "pre_scale") if getattr(meta, key)}
        tensors[name] = data
    data = {"version": version_of(manifest), "tensors": tensors, "aliases": manifest.aliases}
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def read(metadata: Mapping[str, str]) -> Manifest:
    """Read the manifest from a file's __metadata__; empty if there is none. Raises ValueError or KeyedError."""
    if KEY not in metadata:
        return Manifest()
    text = metadata[KEY].encode("utf-8", "surrogatepass")
    data = parse(text, max_bytes=MAX_MANIFEST_BYTES, max_depth=MAX_MANIFEST_DEPTH, floats=True)
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is int and version > VERSION:
        raise ValueError(
            f"format version {version} is newer than this release supports ({VERSION}); upgrade pennyweight to open it"
        )
    check_keys("manifest", data, required={"version", "tensors", "aliases"}, optional=set())
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"format version {str(version)[:40]!r}; this release supports 1 to {VERSION}")
    if not isinstance(data["tensors"], dict) or not isinstance(data["aliases"], dict):
        raise ValueError("manifest: tensors and aliases must be objects")
    convert = partial(_meta, version=version)
    tensors = {name: _named(name, convert, raw) for name, raw in data["tensors"].items()}
    aliases = {name: _named(name, _alias, raw) for name, raw in data["aliases"].items()}
    manifest = Manifest(tensors, aliases)
    if version != version_of(manifest):  # the version distinguishes a plain tensor named "<tensor>.perm" from a part
        raise ValueError(f"declares format version {version}, but its contents need version {version_of(manifest)}")
    return manifest


def _named(name: str, convert: Any, raw: Any) -> Any:
    try:
        check_name(name)
        return convert(raw)
    except ValueError as e:
        raise KeyedError(name, str(e)) from e


def _alias(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("an alias must name a stored tensor")
    check_name(raw)
    return raw


def _meta(raw: Any, version: int) -> Meta:
    check_keys("quantized tensor", raw, {"spec", "shape", "dtype"}, {"act", "axes"} | _FLAGS[version])
    spec, shape, dtype, axes = QuantSpec.from_dict(raw["spec"]), raw["shape"], raw["dtype"], raw.get("axes")
    if not isinstance(shape, list) or len(shape) > MAX_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape must be a list of at most {MAX_AXES} non-negative integers")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    size_of(DTYPES[dtype], tuple(shape))
    if axes is not None:
        if not isinstance(axes, list) or not all(type(a) is int for a in axes) or sorted(axes) != [*range(len(shape))]:
            raise ValueError(f"axes must be a permutation of 0..{len(shape) - 1}")
        if axes == sorted(axes):
            raise ValueError("axes must be omitted if they are in stored order")
    for key in _FLAGS[version]:
        if type(raw.get(key, True)) is not bool:
            raise ValueError(f"{key} must be true or false")
    if raw.get("perm") and (not shape or max(shape) > torch.iinfo(torch.int32).max):
        raise ValueError("perm needs an axis, with at most 2^31 - 1 entries")
    if raw.get("pre_scale") and not shape:
        raise ValueError("pre_scale needs an axis")
    act = None if raw.get("act") is None else ActivationSpec.from_dict(raw["act"])
    _check_spec(spec)
    if act is not None:
        _check_spec(act.spec)
        if act.rule is not None and act.rule not in RULES:
            raise ValueError(f"act: unknown rule {act.rule[:40]!r}; known: {', '.join(RULES)}")
        if act.eps is not None and not (math.isfinite(act.eps) and act.eps >= 0):
            raise ValueError(f"act: eps must be finite and not negative, got {act.eps}")
    if raw.get("flat") and len(shape) < 3:
        raise ValueError("flat needs three axes or more; otherwise it is how codes are stored anyway")
    if raw.get("guard") and shape == [0]:
        raise ValueError("a tensor of shape [0] has no guard, which would have its shape")
    axes = None if axes is None else tuple(axes)
    return Meta(spec, tuple(shape), DTYPES[dtype], act, axes, **{key: raw.get(key, False) for key in _FLAGS[version]})


def _check_spec(spec: QuantSpec) -> None:
    """Checks that QuantSpec itself does not make, but a file must satisfy."""
    if spec.layout != "plain":
        raise ValueError(f"layout {spec.layout[:40]!r}: files store bit streams and declare no layout")
    if spec.mid and not (spec.format.kind == "int" and spec.format.lo <= spec.mid <= spec.format.hi):
        raise ValueError(f"mid {spec.mid} is not a code of {spec.format}")
    for kind in (spec.scale, spec.offset):
        if isinstance(kind, QuantSpec):
            _check_spec(kind)


def clean(spec: QuantSpec) -> QuantSpec:
    """The spec as stored in files: without layouts, at any depth."""
    parts = {s: clean(k) for s in ("scale", "offset") if isinstance(k := getattr(spec, s), QuantSpec)}
    return spec.with_(layout="plain", **parts)


def check_parts(manifest: Manifest, stored: Stored) -> None:
    """Raise KeyedError unless exactly the parts that the manifest implies are stored, with their dtypes and shapes.

    Checks dtypes and shapes only; ``stored`` maps every name in the file to them.
    """
    owned: set[str] = set()
    for name, meta in manifest.tensors.items():
        try:
            parts = stored_parts(name, meta)
            for dtype, shape in parts.values():
                size_of(dtype, shape)
        except ValueError as e:
            raise KeyedError(name, f"{meta.spec} does not fit shape {list(meta.shape)[:8]}: {e}") from e
        for part, (dtype, shape) in parts.items():
            if part not in stored:
                raise KeyedError(name, f"part {part} is missing")
            if stored[part] != (dtype, shape):
                if part == name:
                    raise KeyedError(name, "is both a plain tensor and a quantized one")
                got, size = stored[part]
                raise KeyedError(
                    name, f"part {part} is {got} {list(size)}, but {meta.spec} of shape {list(meta.shape)} needs "
                    f"{dtype} {list(shape)}"
                )  # fmt: skip
        owned.update(parts)  # `|=` with the keys of a dict would copy the set each time
        if name in stored and not meta.guard:
            raise KeyedError(name, "is both a plain tensor and a quantized one")
    known = (PART_NAMES, PART_NAMES_2, PART_NAMES_3, PART_NAMES_3, PART_NAMES_5)[version_of(manifest) - 1]
    for name in sorted(stored.keys() - owned):
        for prefix, then in _prefixes(name):
            if then in known and prefix in manifest.tensors:
                raise KeyedError(prefix, f"unexpected part {name}, which {manifest.tensors[prefix].spec} does not have")
        if stored[name] == GUARD and f"{name}.codes" in stored:
            raise KeyedError(name, "has parts, but the file does not describe it: its metadata were lost or changed")
    for name in manifest.tensors:
        if any(prefix in manifest.tensors for prefix, _ in _prefixes(name)):
            raise KeyedError(name, "its name is nested in that of another quantized tensor")
    for alias, target in manifest.aliases.items():
        if alias in stored or alias in manifest.tensors or alias in owned:
            raise KeyedError(alias, f"is stored, and is an alias of {target}")
        if target not in manifest.tensors and (target not in stored or target in owned):
            raise KeyedError(alias, f"is an alias of {target}, which is not in this file")


def _prefixes(name: str) -> list[tuple[str, str]]:
    """For "a.b.c": ("a", "b") and ("a.b", "c")."""
    parts = name.split(".")
    return [(".".join(parts[:i]), parts[i]) for i in range(1, len(parts))]
