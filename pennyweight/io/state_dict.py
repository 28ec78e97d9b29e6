"""State dicts: flatten and unflatten, which convert quantized tensors to and from plain tensors plus metadata; the
items to write of a state dict; and the slots of a model that its tensors fill."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..core import blocks
from ..core.layouts import pack_zero_point
from ..core.model_arguments import check_mapping
from ..core.numerics import Parts
from ..core.packing import flat_rows, pack_bits
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor, each_part
from ..planning.parameters import kind_of, places
from .file import CheckpointError, KeyedError, checkpoint_errors
from .manifest import GUARD, KEY, Manifest, Meta, Stored, check_parts, clean, dump, read, stored_parts
from .safetensors_file import DTYPE_NAMES, check_name
from .validate import check_data, check_plain, check_range, is_signed, read_parts


@dataclass(frozen=True)
class Slot:
    """A place in a model that stores a tensor."""

    module: nn.Module
    attr: str
    tensor: Tensor
    is_param: bool

    @property
    def op(self) -> str:
        """The op that uses the weight, which determines its layout."""
        kind = kind_of(self.module)
        if kind is not None and self.attr in kind.params:
            return kind.op
        return "bmm" if self.tensor.ndim == 3 else "linear"

    def put_back(self) -> None:
        """Undo an assignment, bypassing the module's ``__setattr__``."""
        m = self.module
        for table in (m._parameters, m._buffers, m.__dict__):
            if self.attr in table:
                table[self.attr] = self.tensor
                return


def slots_of(model: nn.Module) -> dict[str, Slot]:
    """Every parameter and persistent buffer under all of its names, and weights kept as plain tensors (by PEFT)."""
    out: dict[str, Slot] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        out |= {dot + n: Slot(module, n, p, True) for n, p in module._parameters.items() if p is not None}
        for n, b in module._buffers.items():
            if b is not None and n not in module._non_persistent_buffers_set:
                out[dot + n] = Slot(module, n, b, False)
    for where in places(model):
        for p in where:
            if p.name not in out:
                out[p.name] = Slot(p.module, p.param, p.get(), False)
    return out


def meta_buffers(model: nn.Module) -> list[str]:
    """Non-persistent buffers on the meta device, which no checkpoint contains."""
    return [
        f"{prefix}.{n}" if prefix else n
        for prefix, module in model.named_modules()
        for n in sorted(module._non_persistent_buffers_set)
        if (b := module._buffers.get(n)) is not None and b.device.type == "meta"
    ]


@dataclass(frozen=True)
class Item:
    """One tensor to write: the parts it stores, and a function that creates them when it is written.

    make gives (stored name, first element, tensor): each stored tensor whole, or piece by piece.
    """

    name: str
    stored: Stored
    make: Callable[[], Iterable[tuple[str, int, Tensor]]]
    meta: Meta | None = None  # of a quantized tensor
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.stored.values())


def items(state_dict: Mapping[str, Any]) -> list[Item]:
    """The items of a state dict, nothing packed yet; tied tensors once, under their first name.

    Raises CheckpointError for a value that cannot be stored: not a tensor, on meta, of a foreign tensor class.
    """
    check_mapping("state_dict", state_dict)
    first: dict[Any, str] = {}
    ties: dict[str, list[str]] = {}
    kept: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        _storable(name, value)
        key = identity(value)
        if key is not None and key in first:
            ties[first[key]].append(name)
            continue
        if key is not None:
            first[key] = name
        kept[name], ties[name] = value, []
    out = [_item(name, value, tuple(ties[name])) for name, value in kept.items()]
    manifest = manifest_of(out)
    stored: Stored = {}
    for item in out:
        twice = stored.keys() & item.stored.keys()
        if twice:
            raise CheckpointError(None, item.name, f"stored name {min(twice)} is used by another tensor; rename one")
        stored |= item.stored
    with checkpoint_errors(None):
        check_parts(manifest, stored)
    return out


def manifest_of(some: list[Item]) -> Manifest:
    """The manifest of a file with these items."""
    tensors = {i.name: i.meta for i in some if i.meta is not None}
    return Manifest(tensors, {alias: i.name for i in some for alias in i.aliases})


def metadata_of(some: list[Item], extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A file's __metadata__. Other readers expect "format": "pt"."""
    extra = dict(extra or {})
    for key, value in extra.items():
        if key in (KEY, "format") or not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointError(
                None, None, f"metadata {key!r}: keys and values must be strings; {KEY!r} and 'format' are reserved"
            )
    return {**extra, "format": "pt", KEY: dump(manifest_of(some))}


def flatten(state_dict: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors under their stored names, and metadata, for any safetensors writer.

    Inverse of :func:`unflatten`. Raises CheckpointError for a value that cannot be stored.
    """
    some = items(state_dict)
    tensors: dict[str, Tensor] = {}
    for item in some:
        tensors.update((stored, tensor) for stored, _, tensor in item.make())
    return tensors, metadata_of(some)


def unflatten(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """The state dict passed to :func:`flatten`; tied names share one tensor. Validates everything; CheckpointError."""
    check_mapping("tensors", tensors)
    check_mapping("metadata", metadata)
    with checkpoint_errors(None):
        manifest = read(metadata)
        check_parts(manifest, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
        return assemble(manifest, list(tensors), tensors.__getitem__)


def assemble(manifest: Manifest, stored: list[str], get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Validate the data and build every tensor; parts are already checked. Raises KeyedError."""
    part_names = {p for name, meta in manifest.tensors.items() for p in stored_parts(name, meta)}
    out: dict[str, Tensor] = {}
    for name in stored:
        if name not in part_names:
            out[name] = get(name)
            check_plain(name, out[name])
    for name, meta in manifest.tensors.items():
        check_data(name, meta, get)
        out[name] = build(name, meta, get)
    for alias, target in manifest.aliases.items():
        out[alias] = out[target]
    return out


def build(name: str, meta: Meta, get: Callable[[str], Tensor]) -> AffineQuantizedTensor:
    """The quantized tensor over its stored parts: codes below 8 bits stay a bit stream, so no large copy is made."""
    shape, spec = meta.stored_shape, meta.spec
    as_bits = spec.format.bits < 8 and len(shape) > 0
    if as_bits:
        part_shape = blocks.counts(spec.block, shape)
        parts: dict[str, Any] = {
            s: read_parts(f"{name}.{s}", k, part_shape, get) if isinstance(k, QuantSpec) else get(f"{name}.{s}")
            for s, k in spec.part_specs().items()
        }
        if spec.table_shape is not None:
            parts["table"] = get(f"{name}.table")
        value = Parts(get(f"{name}.codes"))._replace(**parts)
    else:
        value = read_parts(name, spec, shape, get)
    if meta.act is not None and meta.act.mode == "static":
        value = value._replace(act_scale=get(f"{name}.act_scale"))
        if meta.act.spec.zero_point:
            value = value._replace(act_zero_point=get(f"{name}.act_zero_point"))
    if meta.perm:
        value = value._replace(perm=get(f"{name}.perm"))
    if meta.pre_scale:
        value = value._replace(pre_scale=get(f"{name}.pre_scale"))
    spec = spec.with_(layout="flat_bits" if meta.flat else "bits") if as_bits else spec
    return AffineQuantizedTensor(value, spec, meta.shape, meta.dtype, meta.act, meta.axes)


def identity(value: Tensor) -> Any:
    """A key, equal for tensors that share memory, dtype, shape and strides; None if that cannot be determined."""
    if isinstance(value, AffineQuantizedTensor):
        keys = [identity(p) for p in value.parts if p is not None]
        static = (value.spec, value.act, value.axes, tuple(value.shape), value.dtype)
        return None if None in keys else (static, *keys)
    if value.device.type == "meta" or value.numel() == 0:
        return None
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device


def _storable(name: str, value: Any) -> None:
    with checkpoint_errors(None, str(name)):
        check_name(name)
    if not isinstance(value, Tensor):
        raise CheckpointError(None, name, f"is a {type(value).__name__}; only tensors can be stored, leave it out")
    if is_lazy(value) or value.device.type == "meta":
        raise CheckpointError(None, name, "has no data (it is on the meta device, or lazy); materialize it first")
    if isinstance(value, AffineQuantizedTensor):
        return
    if is_traceable_wrapper_subclass(value) or value.layout is not torch.strided:
        raise CheckpointError(
            None, name, f"is a {type(value).__name__} ({value.layout}); convert it to a dense tensor first"
        )
    if value.dtype not in DTYPE_NAMES:
        raise CheckpointError(None, name, f"safetensors has no dtype for {value.dtype}")


def _item(name: str, value: Tensor, aliases: tuple[str, ...]) -> Item:
    if not isinstance(value, AffineQuantizedTensor):
        stored: Stored = {name: (value.dtype, tuple(value.shape))}
        return Item(name, stored, lambda: [(name, 0, value.detach().contiguous())], None, aliases)
    meta = describe(name, value)

    def make() -> Iterable[tuple[str, int, Tensor]]:
        return [(part, 0, tensor) for part, tensor in pack(name, value, meta).items()]

    return Item(name, stored_parts(name, meta), make, meta, aliases)


def describe(name: str, w: AffineQuantizedTensor) -> Meta:
    """The Meta of w. Raises CheckpointError for a static activation that was not calibrated."""
    act = None if w.act is None else type(w.act)(clean(w.act.spec), w.act.mode, w.act.rule, w.act.eps)
    if act is not None and act.mode == "static" and (
        w.act_scale is None or (w.act_zero_point is None) == act.spec.zero_point
    ):  # fmt: skip
        raise CheckpointError(None, name, f"its activation ({act}) has no stored parameters; calibrate it first")
    scale = w.scale
    scale = scale.plain_parts() if isinstance(scale, AffineQuantizedTensor) else scale
    spec = clean(w.spec)
    signed = is_signed(scale, spec, blocks.counts(spec.block, w.stored_shape))
    parts = {"perm": w.perm is not None, "pre_scale": w.pre_scale is not None}
    return Meta(spec, tuple(w.shape), w.dtype, act, w.axes, signed, **parts).for_writing()


def pack(name: str, w: AffineQuantizedTensor, meta: Meta) -> dict[str, Tensor]:
    """Stored tensors of w, validated as on reading, so that the file can be read back. Raises CheckpointError."""
    packed = w.spec.is_stream and w.spec.format.bits < 8 and w.ndim > 0  # files store the bit stream
    if packed:
        w = w.to_layout("flat_bits" if meta.flat else "bits")
        parts = each_part(w.parts, lambda p: p.plain_parts() if isinstance(p, AffineQuantizedTensor) else p)
    else:
        parts = w.plain_parts()
    with checkpoint_errors(None, name, "cannot be stored: "):
        return pack_parts(name, parts, meta, packed)


def from_parts(name: str, parts: Parts, meta: Meta, packed: bool = False) -> AffineQuantizedTensor:
    """The quantized tensor of plain parts read from a file of any format. packed: codes are already a bit stream.

    Raises KeyedError if they are invalid.
    """
    return build(name, meta, pack_parts(name, parts, meta, packed).__getitem__)


def pack_parts(name: str, parts: Parts, meta: Meta, packed: bool = False) -> dict[str, Tensor]:
    """Stored tensors of parts, validated as on reading. packed: codes are already a bit stream.

    Raises KeyedError if they do not match ``meta`` or are invalid.
    """
    out: dict[str, Tensor] = {}
    _put(out, name, parts, meta.spec, packed, meta.flat)
    if meta.act is not None and meta.act.mode == "static":
        out[f"{name}.act_scale"] = _number(name, parts.act_scale).float()
        if parts.act_zero_point is not None:
            out[f"{name}.act_zero_point"] = _number(name, parts.act_zero_point).to(meta.act.spec.zero_point_dtype)
    if parts.perm is not None:
        out[f"{name}.perm"] = parts.perm.to(torch.int32)
    if parts.pre_scale is not None:
        out[f"{name}.pre_scale"] = parts.pre_scale
    if meta.guard:  # with memory of its own: writers take tensors of one address for the same tensor
        out[name] = torch.zeros(1, dtype=GUARD[0], device="cpu")[:0]
    out = {k: t.detach().contiguous() for k, t in out.items()}
    check_parts(Manifest({name: meta}), {k: (t.dtype, tuple(t.shape)) for k, t in out.items()})
    on_cpu = {k: t.cpu() for k, t in out.items()}
    check_data(name, meta, on_cpu.__getitem__)
    return out


def _number(name: str, value: Tensor | None) -> Tensor:
    if value is None or value.numel() != 1:
        raise CheckpointError(None, name, "a static activation must have one scale and one zero point per tensor")
    return value.reshape(1)


def _put(
    out: dict[str, Tensor], name: str, parts: Parts, spec: QuantSpec, packed: bool = False, flat: bool = False
) -> None:
    f, codes = spec.format, parts.codes
    if f.bits < 8 and not packed:
        codes = codes.reshape(flat_rows(codes.shape)) if flat else codes
        codes = pack_bits(f.to_unsigned(codes), f.bits)
    out[f"{name}.codes"] = codes
    if spec.table_shape is not None:
        out[f"{name}.table"] = parts.table
    for slot, kind in spec.part_specs().items():
        part = getattr(parts, slot)
        if isinstance(part, Parts) and isinstance(kind, QuantSpec):
            _put(out, f"{name}.{slot}", part, kind)
        else:
            if slot == "zero_point" and spec.zero_point_bits < 8 and not packed:
                try:  # values that are too large would overlap their neighbors in the bit stream
                    check_range(part, spec.zero_point_format, f"{name}.zero_point")
                except ValueError as e:
                    raise KeyedError(name, str(e)) from e
                part = pack_zero_point(part.reshape(flat_rows(part.shape)) if flat else part, spec)
            out[f"{name}.{slot}"] = part
