"""Output formats of safetensors files: the stored form of each tensor, written in pieces; and a state dict in another
library's format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.convert_spec import conversion_kind, convert_parts
from ..core.numerics import Parts, dequantize, quantize, sqnr
from ..core.spec import DTYPES, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from .codecs import CODECS, Codec, Writing
from .config_files import METHOD
from .file import CheckpointError
from .lazy_checkpoint import StoredTensor, shared_parts
from .manifest import Meta, Stored, clean, stored_parts
from .meta_model import looks_linear
from .safetensors_file import DTYPE_NAMES, Entry
from .state_dict import Item, items, metadata_of, pack
from .streaming import COPY_BYTES, ROWS_NUMEL, QuantizationNoise

EXACT, REQUANTIZED, FLOAT, COPIED = "exact", "requantized", "float", "copied"
QUANTIZED, FLOATS, ANY = "quantized", "floats", "any"


@dataclass(frozen=True)
class OutputChoice:
    """How one tensor is written.

    kind  Meta of a quantized one, else dtype and shape
    how   "exact", "requantized" (the same codes with rounded scales where possible), "float" (was quantized),
          "copied" (is float)
    why   the reason, where it is not exact
    codes whether a requantized tensor keeps its codes, and only its scales are rounded
    drops_inputs  whether inputs were quantized, and will not be
    """

    kind: Meta | Entry
    how: str
    why: str = ""
    codes: bool = False
    drops_inputs: bool = False


@dataclass(frozen=True)
class OutputFormat:
    """An output format.

    choose    decides how a stored tensor is written
    stored    names, dtypes and shapes stored for that choice
    pack      stored tensors from plain parts
    by_rows   whether ``pack`` accepts some rows of a tensor, so that it can be written piece by piece
    method    ``quantization_config`` for the quantized tensors and the linear weights that stay float
    holds     "quantized" tensors (at least one), "floats" only, or "any"
    aliases   whether tied names are kept; otherwise tensors that config.json does not tie are stored twice
    metadata  ``__metadata__`` of a file with these tensors
    """

    name: str
    choose: Callable[[str, StoredTensor], OutputChoice]
    stored: Callable[[str, OutputChoice], Stored]
    pack: Callable[[str, Parts, Meta], dict[str, Tensor]]
    by_rows: bool
    method: Callable[[Mapping[str, Meta], tuple[str, ...]], dict[str, Any] | None]
    holds: str
    aliases: bool = False
    metadata: Callable[[list[Item]], dict[str, str]] = lambda shard: {"format": "pt"}


def native_target(method: dict[str, Any]) -> OutputFormat:
    """Pennyweight's own format, which can store every tensor."""

    def choose(name: str, stored: StoredTensor) -> OutputChoice:
        kind = stored.kind
        return OutputChoice(kind.for_writing(), EXACT) if isinstance(kind, Meta) else OutputChoice(kind, COPIED)

    def stored(name: str, choice: OutputChoice) -> Stored:
        return stored_parts(name, choice.kind) if isinstance(choice.kind, Meta) else _plain(name, choice.kind)

    def put(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
        w = AffineQuantizedTensor(parts, meta.spec, meta.shape, meta.dtype, meta.act, meta.axes)
        return pack(name, w, meta)

    return OutputFormat(METHOD, choose, stored, put, True, lambda metas, plain: method, ANY, True, metadata_of)


def float_target(dtype: torch.dtype | None) -> OutputFormat:
    """Plain tensors: quantized ones are dequantized, to ``dtype`` or the dtype they represent."""

    def choose(name: str, stored: StoredTensor) -> OutputChoice:
        kind = stored.kind
        if isinstance(kind, Meta):
            return OutputChoice(Entry(dtype or kind.dtype, kind.shape), FLOAT, f"dequantized from {stored.shown}")
        return _copied(kind, dtype)

    def none(*args: Any) -> dict[str, Tensor]:
        raise AssertionError("a float checkpoint contains no quantized tensors")

    return OutputFormat(
        "float", choose, lambda name, c: _plain(name, c.kind), none, True, lambda metas, plain: None, FLOATS
    )


def foreign_target(format: str, writing: Writing) -> OutputFormat:
    """A format of another library: exact where it can represent the tensor, else its nearest spec, else float."""

    def choose(name: str, stored: StoredTensor) -> OutputChoice:
        kind = stored.kind
        if not isinstance(kind, Meta):
            return OutputChoice(kind, COPIED)
        why = writing.refuses(name, kind)
        near = kind.spec if why is None else writing.nearest(name, kind)
        if why is None and kind.perm and not writing.perm:
            why = f"its channels are permuted, and {format} does not store the permutation"
        if why is None and kind.pre_scale:
            why = f"its input is scaled per channel (pre_scale), and {format} does not store that"
        if why is None:
            return OutputChoice(kind, EXACT)
        if near is None:
            return OutputChoice(Entry(kind.dtype, kind.shape), FLOAT, why)
        same = kind.act is not None and near.format.kind == kind.spec.format.kind
        new = replace(kind, spec=near, act=kind.act if same else None, signed_scale=True, perm=False, pre_scale=False)
        refused = writing.refuses(name, new)
        if refused is not None and new.act is not None:
            new = replace(new, act=None)
            refused = writing.refuses(name, new)
        if refused is not None:
            return OutputChoice(Entry(kind.dtype, kind.shape), FLOAT, refused)
        in_order = not (kind.perm or kind.pre_scale)
        same_codes = in_order and conversion_kind(kind.spec, kind.stored_shape, new.spec) is not None
        return OutputChoice(new, REQUANTIZED, why, same_codes, kind.act is not None and new.act is None)

    def stored(name: str, choice: OutputChoice) -> Stored:
        return writing.stored(name, choice.kind) if isinstance(choice.kind, Meta) else _plain(name, choice.kind)

    return OutputFormat(format, choose, stored, writing.pack, False, writing.method, QUANTIZED)


def planned_item(
    target: OutputFormat,
    name: str,
    source: StoredTensor,
    choice: OutputChoice,
    aliases: tuple[str, ...],
    noise: QuantizationNoise,
) -> Item:
    """The Item to be written for a tensor. Making it records the quantization noise of tensors that are not exact."""

    def make() -> Iterator[tuple[str, int, Tensor]]:
        meta = choice.kind if isinstance(choice.kind, Meta) else None
        by_rows = target.by_rows or meta is None
        for start, w in row_chunks(source, by_rows):
            if meta is None:
                out = {name: as_float(name, w, choice.kind.dtype, noise if choice.how == FLOAT else None)}
            else:
                assert isinstance(w, AffineQuantizedTensor)
                part = meta if tuple(w.shape) == meta.shape else replace(meta, shape=tuple(w.shape))
                parts = convert_or_requantize(name, w, choice.how == EXACT, part.spec, noise, part.perm)
                out = target.pack(name, parts, part)
            for stored, tensor in out.items():
                if start == 0 or meta is None or stored not in shared_parts(name):
                    yield stored, start * (tensor.numel() // max(1, tensor.shape[0])) if start else 0, tensor

    meta = choice.kind if isinstance(choice.kind, Meta) else None
    return Item(name, target.stored(name, choice), make, meta, aliases)


def row_chunks(stored: StoredTensor, by_rows: bool) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor, a few million elements at a time if it can be read by rows; else all of it."""
    shape = stored.kind.shape
    width = max(1, torch.Size(shape[1:]).numel()) if shape else 1
    if stored.rows is None or not by_rows or shape[0] == 0:
        yield 0, stored.read()
        return
    bytes_each = max(1, stored.nbytes // max(1, torch.Size(shape).numel()))
    step = max(1, ROWS_NUMEL // width if stored.meta is not None else COPY_BYTES // (bytes_each * width))
    for start in range(0, shape[0], step):
        yield start, stored.rows(start, min(start + step, shape[0]))


def convert_or_requantize(
    name: str, w: AffineQuantizedTensor, exact: bool, spec: QuantSpec, noise: QuantizationNoise, perm: bool = False,
    requantize: Callable[[Tensor], Parts] | None = None,
) -> Parts:  # fmt: skip
    """Plain parts of w under ``spec``: unchanged if ``exact``, else the same codes with rounded scales where possible,
    else requantized from the values; records the quantization noise.

    perm: whether the result keeps w's channel permutation. requantize: gives the parts of float values under ``spec``,
    of a format without quantized activations; default: round to nearest, with the parameters of w's static activation.
    """
    parts, shape, own_spec = w.plain_parts(), w.stored_shape, clean(w.spec)
    if requantize is not None:
        parts = parts._replace(act_scale=None, act_zero_point=None)
    if exact:
        return parts
    was = dequantize(parts, own_spec, shape)
    # blocks differ in the original channel order, and under the scales that a pre_scale leaves
    other = parts.pre_scale is not None or (parts.perm is not None and not perm)
    new = None if other else convert_parts(parts, own_spec, shape, spec)
    if new is None and requantize is not None:
        new = requantize(was)
    elif new is None:
        new = quantize(was, spec)._replace(act_scale=parts.act_scale, act_zero_point=parts.act_zero_point)
    noise.compare(name, was, dequantize(new, spec, shape))
    return new


def as_float(name: str, w: Tensor, dtype: torch.dtype, noise: QuantizationNoise | None) -> Tensor:
    """w as a plain tensor of ``dtype``. Raises CheckpointError if its values do not fit."""
    if isinstance(w, AffineQuantizedTensor):
        exact = w.dequantize(torch.float32)
        out = exact.to(dtype)
        if noise is not None:
            noise.add(name, exact, sqnr(exact, out))
    else:
        exact, out = w, w.to(dtype)
    if out.dtype != exact.dtype and out.is_floating_point() and not torch.equal(out.isfinite(), exact.isfinite()):
        raise CheckpointError(None, name, f"has values outside the range of {dtype}; choose another dtype")
    return out.contiguous()


def _copied(kind: Entry, dtype: torch.dtype | None) -> OutputChoice:
    if dtype is None or dtype == kind.dtype or kind.dtype not in DTYPES.values():
        return OutputChoice(kind, COPIED)
    return OutputChoice(Entry(dtype, kind.shape), COPIED, f"was {DTYPE_NAMES[kind.dtype]}")


def _plain(name: str, kind: Meta | Entry) -> Stored:
    return {name: (kind.dtype, kind.shape)}


# Formats that transformers can read without this package, and save_pretrained can write
FORMATS = ("compressed-tensors",)


def convert_exactly(
    state_dict: Mapping[str, Any], format: str, linear: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Stored tensors and "quantization_config" of config.json, readable without this package.

    format  one of FORMATS
    linear  names of nn.Linear weights; the reader does not recognize other weights

    Raises CheckpointError for a tensor that the format, or its reader in transformers, cannot represent exactly. The
    minimum scale of dynamic activations (``ActivationSpec.eps``) is not kept: the reader has its own.
    """
    codec = next(c for c in CODECS if c.name == format)
    assert codec.writing is not None
    some = items(state_dict)
    tensors: dict[str, Tensor] = {}
    metas: dict[str, Meta] = {}
    plain: list[str] = []
    for item in some:
        value = state_dict[item.name]
        if item.meta is None:
            # tied tensors are stored under each name; the caller decides which to omit
            tensors |= dict.fromkeys((item.name, *item.aliases), value)
            if looks_linear(item.name, Entry(value.dtype, tuple(value.shape))):
                plain.append(item.name)
            continue
        why = _refused(codec, item, linear)
        if why is not None:
            raise CheckpointError(
                None, item.name, f"cannot be saved as {format}: {why}; save this model in Pennyweight's own format"
            )
        metas[item.name] = item.meta
        tensors |= codec.writing.pack(item.name, value.plain_parts(), item.meta)
    method = codec.writing.method(metas, tuple(plain))
    _check_read_back(codec, tensors, metas, method)
    return tensors, method


def _refused(codec: Codec, item: Item, linear: Collection[str]) -> str | None:
    meta = item.meta
    assert meta is not None
    assert codec.writing is not None
    if item.name not in linear or item.aliases:
        return "its reader supports only quantized weights of linear layers that are not tied"
    why = codec.writing.refuses(item.name, meta)
    if why is not None:
        return why
    if meta.perm:
        return "its channels are permuted"
    if meta.pre_scale:
        return "its input is scaled per channel (pre_scale)"
    if meta.spec.zero_point:
        return "its reader in transformers does not support zero points (compressed-tensors 0.20)"
    if isinstance(meta.spec.scale, QuantSpec) and meta.dtype is not torch.bfloat16:
        return f"its reader dequantizes MX formats to bfloat16, but the model is {meta.dtype}"
    return None


def _check_read_back(
    codec: Codec, tensors: Mapping[str, Tensor], metas: Mapping[str, Meta], method: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless the codec reads the stored tensors back unchanged."""
    entries = {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    found = codec.find(entries, method, tensors.__getitem__)
    for name, meta in metas.items():
        back = found[name].meta
        if back.spec != meta.spec or _without_eps(back) != _without_eps(meta):
            raise CheckpointError(
                None, name, f"cannot be saved as {codec.name}: {meta.spec} would be read back as {back.spec}; save "
                "this model in Pennyweight's own format"
            )  # fmt: skip


def _without_eps(meta: Meta) -> Any:
    return None if meta.act is None else replace(meta.act, eps=None)
