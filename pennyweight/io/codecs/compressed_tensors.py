"""compressed-tensors, the format of llm-compressor and vLLM: reader. O rows, I columns, b bits, groups of G columns.

    kind    codes of a layer's weight                        weight_scale
    packed  weight_packed i32 [O, words] (see base.py),         float [1], [O, 1] or [O, I/G]
            stored as q + 2**(b-1); weight_shape i64 [2]
    int     weight i8 [O, I]                                 the same, or by blocks of rows and columns
    float   weight f8e4m3 [O, I]                             the same
    nvfp4   weight_packed u8 [O, I/2], low nibble first      f8e4m3 [O, I/16], to be divided by weight_global_scale
    mxfp4   the same                                         u8 [O, I/32]: 2**(s - 127)
    mxfp6   weight_packed u8 [O, I*3/4], a bit stream        the same
    mxfp8   weight f8e4m3 [O, I]                             the same

``weight_zero_point`` has the scale's shape, i8; packed, it is i32 [words of O, groups], each column packed into a
column of words. ``input_scale`` and ``input_zero_point`` of static activations are scalars. Values are
(q - zero_point) * scale. Source: compressed-tensors 0.20, compressors/ and quantization/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.numerics import Parts
from ...core.packing import unpack_bits
from ...core.spec import ActivationSpec, QuantSpec
from ..file import KeyedError
from ..manifest import Meta
from ..safetensors_file import Entry
from . import base
from .base import FLOATS, Codec, Config, Entries, Found, Get
from .compressed_tensors_config import KINDS, Group, Groups
from .compressed_tensors_write import WRITING

_F8 = (torch.float8_e4m3fn,)
_ZEROS = (torch.int8, torch.int32, torch.int64, *FLOATS, *_F8)  # stored zero points of symmetric schemes

ENDINGS = (
    "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx",
    "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
)  # fmt: skip


def claims(config: Config, entries: Entries) -> bool:
    return config.get("quant_method") == "compressed-tensors"


def find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    """See Codec.find. Reads only the two numbers of each ``weight_shape``."""
    layers = base.by_layer(entries, ENDINGS)
    for name, entry in entries.items():
        layer, _, ending = name.rpartition(".")
        if ending == "weight" and (layer in layers or entry.dtype in (torch.int8, *_F8)):
            layers.setdefault(layer, {})["weight"] = name
    stored = {name for names in layers.values() for name in names.values()}
    dtype, groups = base.model_dtype(entries, stored), Groups(config, layers)
    out = {}
    for layer, names in layers.items():
        weight = base.join(layer, "weight")
        try:
            if not groups.groups:
                raise ValueError("is stored quantized, but no config group quantizes weights")
            found = _layer(weight, names, entries, groups.of(layer), dtype, get)
        except KeyedError:
            raise
        except ValueError as e:
            raise KeyedError(weight, str(e)) from e
        out[weight] = Found(found.meta, tuple(names.values()), found.parts)
    return out


@dataclass(frozen=True)
class _Layer:
    """A layer whose tensors match its group. dense: how codes and zero points are packed into words."""

    meta: Meta
    kind: str
    names: dict[str, str]
    dense: tuple[bool, bool]

    def parts(self, get: Get) -> Parts:
        spec, shape, names = self.meta.spec, self.meta.shape, self.names
        _check_zeros(get, names, spec, self.meta.act)
        part_shape = blocks.counts(spec.block, shape)
        act = self.meta.act is not None and self.meta.act.mode == "static"
        act_zero = act and self.meta.act is not None and self.meta.act.spec.zero_point
        return Parts(
            self._codes(get(names[KINDS[self.kind].codes[0]])),
            self._scale(get, part_shape),
            self._zero_point(get(names["weight_zero_point"]), part_shape) if spec.zero_point else None,
            act_scale=get(names["input_scale"]).float().reshape(1) if act else None,
            act_zero_point=get(names["input_zero_point"]).reshape(1) if act_zero else None,
        )

    def _codes(self, stored: Tensor) -> Tensor:
        spec, columns = self.meta.spec, self.meta.shape[1]
        if self.kind == "packed":
            return spec.format.from_unsigned(base.unpack_words(stored, spec.format.bits, columns, self.dense[0]))
        if stored.dtype is torch.uint8:
            return unpack_bits(stored, spec.format.bits, columns)
        if blocks.padded(spec.block, self.meta.shape) == self.meta.shape:
            return stored
        return blocks.pad(stored.view(torch.uint8), spec.block).view(stored.dtype)

    def _scale(self, get: Get, part_shape: tuple[int, ...]) -> Any:
        scale = get(self.names["weight_scale"])
        if self.kind == "nvfp4":
            name = self.names["weight_global_scale"]
            above = float(get(name))
            if not 0 < above < float("inf"):
                raise ValueError(f"{name} is {above}; scales are divided by it")
            return Parts(scale, torch.full((1, 1), 1.0 / above, dtype=torch.float64, device="cpu"))
        if isinstance(self.meta.spec.scale, QuantSpec):
            return Parts(scale.view(torch.uint8))
        return scale.reshape(part_shape)

    def _zero_point(self, stored: Tensor, part_shape: tuple[int, ...]) -> Tensor:
        if stored.dtype is not torch.int32:
            return stored.reshape(part_shape)
        f = self.meta.spec.format
        return f.from_unsigned(base.unpack_words(stored.t(), f.bits, part_shape[0], self.dense[1])).t().contiguous()


def _check_zeros(get: Get, names: dict[str, str], spec: QuantSpec, act: ActivationSpec | None) -> None:
    """Check that zero points stored for a symmetric scheme are zero."""
    zero = {"weight_zero_point": spec.zero_point, "input_zero_point": act is not None and act.spec.zero_point}
    for ending, used in zero.items():
        if ending in names and not used and bool(get(names[ending]).float().count_nonzero()):
            raise ValueError(f"{names[ending]} is not zero, but the config says symmetric")


def _layer(
    weight: str, names: dict[str, str], entries: Entries, group: Group, dtype: torch.dtype | None,
    get: Get,
) -> _Layer:  # fmt: skip
    _check_names(weight, names, group)
    kind = KINDS[group.kind]
    ending, codes_dtype = kind.codes
    codes = base.need(names[ending], entries, (codes_dtype,))
    scale = base.need(names["weight_scale"], entries, kind.scales)
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise KeyedError(names[ending], f"has shape {list(codes.shape)}, expected non-empty [rows, columns]")
    shape, dense = _shape(names, entries, group, get)
    block = _block(names["weight_scale"], scale, shape, group)
    w = group.weights
    spec = kind.spec or QuantSpec(w.format, block, scale.dtype, zero_point=False if w.symmetric else w.format)
    parts = blocks.counts(spec.block, shape)
    dense_zero = dense
    if "weight_zero_point" in names:
        alike = tuple({scale.shape, parts})
        if group.kind != "packed" or w.symmetric or w.strategy == "tensor":
            base.need(names["weight_zero_point"], entries, _ZEROS if w.symmetric else (torch.int8,), *alike)
        else:
            ways = {base.dense_words(shape[0], w.bits): True, base.whole_words(shape[0], w.bits): False}
            if len(ways) == 1:
                ways = dict.fromkeys(ways, dense)  # both fit: same as the codes
            zero = base.need(names["weight_zero_point"], entries, (torch.int32,), *((n, parts[1]) for n in ways))
            dense_zero = ways[zero.shape[0]]
    for name, dtypes in (("weight_global_scale", (torch.float32,)), ("input_scale", FLOATS)):
        if name in names:
            base.need(names[name], entries, dtypes, (1,), ())
    if "input_zero_point" in names:
        asymmetric = group.act is not None and group.act.spec.zero_point
        base.need(names["input_zero_point"], entries, (torch.int8,) if asymmetric else _ZEROS, (1,), ())
    own = scale.dtype if scale.dtype in FLOATS else torch.bfloat16
    meta = Meta(spec, shape, own if own.itemsize == 2 and scale.dtype in FLOATS else dtype or own, group.act)
    return _Layer(meta, group.kind, names, (dense, dense_zero))


def _check_names(weight: str, names: dict[str, str], group: Group) -> None:
    """Raise KeyedError unless exactly the tensors that the group requires are stored."""
    if "weight_g_idx" in names:
        raise KeyedError(weight, "has permuted channels (weight_g_idx), which is not supported yet")
    w, act = group.weights, group.act
    needed = {KINDS[group.kind].codes[0], "weight_scale"}
    needed |= {"weight_shape"} if group.kind == "packed" else set()
    needed |= {"weight_global_scale"} if group.kind == "nvfp4" else set()
    needed |= set() if w.symmetric else {"weight_zero_point"}
    may = {"weight_zero_point", *(["input_global_scale"] if group.local else [])}
    if act is not None and act.mode == "static":
        needed |= {"input_scale"} | ({"input_zero_point"} if act.spec.zero_point else set())
        may |= {"input_zero_point"}
    for missing in sorted(needed - names.keys()):
        raise KeyedError(weight, f"{missing} is missing; {group.name} stores {sorted(needed)}")
    for extra in sorted(names.keys() - needed - may):
        raise KeyedError(weight, f"{names[extra]} is unexpected; {group.name} stores {sorted(needed)}")


def _shape(names: dict[str, str], entries: Entries, group: Group, get: Get) -> tuple[tuple[int, int], bool]:
    """(rows, columns), and how codes are packed into words."""
    codes = names[KINDS[group.kind].codes[0]]
    rows, stored = entries[codes].shape
    bits = group.weights.bits
    if group.kind == "mxfp6":
        if stored % 3:
            raise KeyedError(codes, f"has rows of {stored} bytes; four numbers take 3")
        return (rows, stored // 3 * 4), True
    if group.kind != "packed":
        return (rows, stored * 2 if bits == 4 and group.kind != "int" else stored), True
    base.need(names["weight_shape"], entries, (torch.int64, torch.int32), (2,))
    said_rows, columns = (int(n) for n in get(names["weight_shape"]).tolist())
    if said_rows != rows or columns < 1:
        raise KeyedError(names["weight_shape"], f"is {[said_rows, columns]}, but {codes} has {rows} rows")
    dense = base.is_dense(stored, columns, bits)
    if dense is None:
        raise KeyedError(
            codes, f"has rows of {stored} words; {columns} columns of {bits} bits ({group.name}) take "
            f"{base.dense_words(columns, bits)}, or {base.whole_words(columns, bits)} in files "
            "of older releases"
        )  # fmt: skip
    return (rows, columns), dense


def _block(name: str, scale: Entry, shape: tuple[int, int], group: Group) -> tuple[int, ...] | None:
    """The block of a scale. Raises KeyedError if the scale's shape does not match the group."""
    w, (rows, columns) = group.weights, shape
    what = f"{group.name} says {w.strategy}"
    block: tuple[int, ...] | None
    shapes: tuple[tuple[int, ...], ...]
    if w.strategy == "tensor":
        block, shapes = None, ((1,), (), (1, 1))
    elif w.strategy == "channel":
        block, shapes = (-1,), ((rows, 1), (rows,))
    elif w.strategy in ("group", "tensor_group") and w.group is not None:
        if columns % w.group:
            raise KeyedError(name, f"{what} of {w.group}, which does not divide {columns} columns")
        block, shapes, what = (w.group,), ((rows, columns // w.group),), f"{what} of {w.group}"
    elif w.strategy == "block" and w.block is not None and group.kind in ("int", "float"):
        block, what = w.block, f"{what} of {list(w.block)}"
        shapes = (blocks.counts(block, shape),)
    else:
        raise KeyedError(name, f"{what}, which is not supported for {group.kind} weights")
    if scale.shape not in shapes:
        raise KeyedError(
            name, f"has shape {list(scale.shape)}, but {what} and the weight is {list(shape)}: expected "
            + " or ".join(str(list(s)) for s in shapes)
        )  # fmt: skip
    return block


COMPRESSED_TENSORS = Codec("compressed-tensors", claims, find, "compressed-tensors 0.20", WRITING)
