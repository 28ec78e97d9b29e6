"""Opened: a mapping from names to the tensors of a checkpoint of any format. Tensors are read on access."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import choose_layout
from ..kernels.table import case_of
from ..planning.quantize_report import ALGORITHM
from ..support.arguments import did_you_mean
from .checkpoint import Checkpoint
from .codecs import CODECS, Codec, Found
from .file import CheckpointError, checkpoint_errors
from .manifest import KEY, Meta, stored_parts
from .safetensors_file import Entry, File
from .state_dict import build, from_parts, slots_of
from .validate import check_data, check_plain

Rows = Callable[[int, int], Tensor]
NEAREST = "nearest"
# Formats whose weights an algorithm chose, unless their metadata say otherwise
_SOLVED = {"gptq": "GPTQ", "gptq_v2": "GPTQ", "awq": "AWQ", "hqq": "HQQ"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as stored in a checkpoint.

    kind    Meta if quantized; else dtype and shape
    nbytes  total bytes stored for it
    read    reads the tensor: quantized (over mapped memory where the format allows) or plain. Raises CheckpointError.
    rows    reads rows [start, stop) of axis 0 into their own memory; None if rows cannot be read separately
    word    the format's name for the storage type ("Q4_K"), if it has one
    """

    kind: Meta | Entry
    nbytes: int
    read: Callable[[], Tensor]
    rows: Rows | None = None
    word: str = ""

    @property
    def meta(self) -> Meta | None:
        return self.kind if isinstance(self.kind, Meta) else None

    @property
    def shown(self) -> str:
        """The storage type for people: its name in the format, the spec, or the dtype."""
        return self.word or (str(self.meta.spec) if self.meta else str(self.kind.dtype).removeprefix("torch."))


@dataclass(frozen=True, eq=False)
class Opened(Mapping[str, Tensor]):
    """An open checkpoint: a mapping from names to tensors, which are read on access. Use as a context manager.

    path      as given
    format    "pennyweight", "safetensors" (floats), "gguf", "gptq", ...
    held      stored tensors by name: shape, dtype, spec, bytes
    aliases   other names of stored tensors
    files     paths of all files, including an index
    metadata  other metadata of the file, not interpreted
    config    config.json, or its equivalent; None if there is none
    """

    path: str
    format: str
    held: Mapping[str, StoredTensor]
    files: tuple[str, ...]
    close: Callable[[], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        stored = self.held.get(self.aliases.get(name, name))
        if stored is None:
            raise KeyError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self)}")
        return stored.read()

    def __iter__(self) -> Iterator[str]:
        yield from self.held
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.held) + len(self.aliases)

    def __contains__(self, name: object) -> bool:  # the default of Mapping would read the tensor
        return name in self.held or name in self.aliases

    def __repr__(self) -> str:
        return f"Opened({self.path!r}, {self.format}, {len(self.held)} tensors)"

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    __hash__ = object.__hash__  # the default of Mapping would read every tensor
    __eq__ = object.__eq__

    @property
    def quantized(self) -> dict[str, Meta]:
        """Meta of each quantized tensor, by name."""
        return {name: stored.meta for name, stored in self.held.items() if stored.meta is not None}

    @property
    def algorithm(self) -> str:
        """The algorithm that chose the codes; "" if they are rounded to nearest, or if the files do not say."""
        said = self.metadata.get(ALGORITHM)
        algorithm = said if isinstance(said, str) else _SOLVED.get(self.format, "") if self.quantized else ""
        return "" if algorithm == NEAREST else algorithm[:200]

    def packed_for(self, model: nn.Module) -> Mapping[str, Tensor]:
        """These tensors, each packed at every access for the kernel that runs it in ``model``, as ``pw.load`` does.

        For a model whose weights are read layer by layer: ``accelerate.cpu_offload(model, device,
        state_dict=pw.open(folder).packed_for(model))``. Files hold no packing, and most formats have no kernel without
        one: packing takes less time than the product with a dequantized weight. Call it before the weights are moved.
        """
        slots = slots_of(model)
        names: dict[str, list[str]] = {}
        for name in slots:
            names.setdefault(self.aliases.get(name, name), []).append(name)
        tied = {id(s.tensor): [n for n, other in slots.items() if other.tensor is s.tensor] for s in slots.values()}
        ops = {
            name: tuple(dict.fromkeys(slots[n].op for n in [*names[self.aliases.get(name, name)], *tied[id(s.tensor)]]))
            for name, s in slots.items()
        }
        return _Packed(self, ops, {name: s.tensor.dtype for name, s in slots.items()})

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors; tied names share one object."""
        out = {name: stored.read() for name, stored in self.held.items()}
        return out | {alias: out[name] for alias, name in self.aliases.items()}


class _Packed(Mapping[str, Tensor]):
    """See :meth:`Opened.packed_for`. The layout of a name is chosen once."""

    def __init__(self, opened: Opened, ops: dict[str, tuple[str, ...]], dtypes: dict[str, torch.dtype]) -> None:
        self.opened, self.ops, self.dtypes = opened, ops, dtypes
        self.layouts: dict[str, str] = {}

    def __getitem__(self, name: str) -> Tensor:
        w = self.opened[name]
        if not isinstance(w, AffineQuantizedTensor) or name not in self.ops or w.ndim < 2:
            return w
        if name not in self.layouts:
            self.layouts[name] = choose_layout(case_of(w, self.dtypes[name]), self.ops[name])[1]
        packed = w.to_layout(self.layouts[name])
        packed.readers = self.ops[name]
        return packed

    def __iter__(self) -> Iterator[str]:
        return iter(self.opened)

    def __len__(self) -> int:
        return len(self.opened)

    def __contains__(self, name: object) -> bool:
        return name in self.opened

    __hash__ = object.__hash__  # the default of Mapping would read every tensor
    __eq__ = object.__eq__


def open_safetensors(
    c: Checkpoint, codec: Codec | None, method: Mapping[str, Any], config: Mapping[str, Any] | None
) -> Opened:
    """Open safetensors with ``codec``; without one, as the native format or floats. Raises CheckpointError."""
    found = {} if codec is None else _find(c, codec, method)
    tensors = {name: _found(c, name, f) for name, f in found.items()}
    owned = {stored for f in found.values() for stored in f.stored}
    for manifest in c.manifests:
        for name, meta in manifest.tensors.items():
            stored = stored_parts(name, meta)
            owned |= stored.keys()
            tensors[name] = _native(c, name, meta)
    for stored, i in c.where.items():
        if stored not in owned:
            tensors[stored] = _plain(c.files[i], stored)
    native = any(KEY in file.metadata for file in c.files)
    metadata: dict[str, str] = {}
    for file in c.files:
        metadata |= {k: v for k, v in file.metadata.items() if k != KEY}
    return Opened(
        c.path,
        codec.name if codec is not None else "pennyweight" if native else "safetensors",
        tensors,
        c.paths,
        c.close,
        c.manifest.aliases,
        metadata,
        config,
    )


def _find(c: Checkpoint, codec: Codec, method: Mapping[str, Any]) -> dict[str, Found]:
    entries = {name: c.entry(name) for name in c.where}
    if c.manifest.tensors:
        raise CheckpointError(c.path, None, f"config.json says {codec.name}, but its tensors are Pennyweight's")
    with checkpoint_errors(c.path, prefix=f"{codec.name}: "):
        found = codec.find(entries, method, c.tensor)
    for name, f in found.items():
        if name in entries and name not in f.stored:
            raise CheckpointError(c.path, name, f"is stored beside {', '.join(f.stored)}: a layer must have one weight")
    used = {part for f in found.values() for part in f.stored}
    left = {name: entry for name, entry in entries.items() if name not in used}
    other = next((o for o in CODECS if o is not codec and o.claims({}, left)), None)
    if other is not None:
        raise CheckpointError(c.path, None, f"contains tensors of two formats, {codec.name} and {other.name}")
    return found


def _found(c: Checkpoint, name: str, found: Found) -> StoredTensor:
    # Scales of other libraries may be negative; the header of an output file is written before they are read
    meta = replace(found.meta, signed_scale=True)

    def read() -> Tensor:
        with checkpoint_errors(c.path, name):
            return from_parts(name, found.parts(c.tensor), meta)

    return StoredTensor(meta, sum(_size(c.entry(s)) for s in found.stored), read)


def _native(c: Checkpoint, name: str, meta: Meta) -> StoredTensor:
    stored = stored_parts(name, meta)
    path = c.files[c.where[next(iter(stored))]].path
    shared = shared_parts(name)  # by all rows of the tensor

    def checked(meta: Meta, get: Callable[[str], Tensor]) -> Tensor:
        with checkpoint_errors(path):
            check_data(name, meta, get)
        return build(name, meta, get)

    def rows(start: int, stop: int) -> Tensor:
        def get(part: str) -> Tensor:
            shape, file = stored[part][1], c.files[c.where[part]]
            if part in shared:
                return file.read(part, 0, shape[0])
            width = math.prod(shape[1:])
            return file.read(part, start * width, stop * width).reshape(stop - start, *shape[1:])

        return checked(replace(meta, shape=(stop - start, *meta.shape[1:])), get)

    by_rows = len(meta.shape) > 1 and meta.axes is None and meta.spec.rows_independent(meta.shape)
    nbytes = sum(_size(c.entry(part)) for part in stored)
    return StoredTensor(meta, nbytes, lambda: checked(meta, c.tensor), rows if by_rows else None)


def shared_parts(name: str) -> tuple[str, ...]:
    """Stored parts of a tensor that are not split by rows."""
    return (name, *(f"{name}.{slot}" for slot in ("act_scale", "act_zero_point", "perm", "pre_scale")))


def _plain(file: File, name: str) -> StoredTensor:
    e = file.entries[name]
    width = math.prod(e.shape[1:])

    def checked(tensor: Tensor) -> Tensor:
        with checkpoint_errors(file.path):
            check_plain(name, tensor)
        return tensor

    def rows(start: int, stop: int) -> Tensor:
        return checked(file.read(name, start * width, stop * width).reshape(stop - start, *e.shape[1:]))

    return StoredTensor(e, _size(e), lambda: checked(file.tensor(name)), rows if len(e.shape) > 1 else None)


def _size(e: Entry) -> int:
    return e.end - e.begin
