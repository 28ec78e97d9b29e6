"""Writes a GGUF file from a checkpoint of any format: types, metadata, tokenizer; tensor by tensor, resumable."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.convert_spec import conversion_kind
from ...core.numerics import Parts, dequantize, sqnr
from ...core.tensor import AffineQuantizedTensor
from ...planning.report import Report, Row
from ..atomic_write import remove_left_over, sync_folder
from ..config_files import folder_of, method_files
from ..file import CheckpointError, checkpoint_errors
from ..lazy_checkpoint import Opened, StoredTensor
from ..output_formats import as_float, convert_or_requantize, row_chunks
from ..resumable_write import Progress, Told, check_room, fingerprint
from ..streaming import QuantizationNoise
from .blocks import TYPES, BlockType
from .config import kv_from_config, pooling_of, rope_tensors
from .gguf_file import Writer, lay_out, remove_partial
from .metadata import Value
from .names import read_patterns, to_gguf
from .quantize import FROM_FLOATS, quantize
from .reader import moved
from .tokenizer import tokenizer_kv

# enum llama_ftype of llama.h: the type of most tensors of a file
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip
# Types tried first for exact storage of a quantized tensor
_IN_ORDER = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "NVFP4", "IQ4_NL", "TQ2_0")
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32"}
# llama.cpp adds these to other tensors, and supports no quantized types there
_FLOAT32 = ("position_embd.weight", "token_types.weight", "_norm.weight", "_norm.bias", ".bias", "ffn_gate_inp.weight")
_NO_ACT = "; its activation quantization is not stored in GGUF"


@dataclass(frozen=True)
class Planned:
    """One tensor of the file. hf: its name in the source; how: as in :class:`..output_formats.OutputChoice`."""

    hf: str
    held: StoredTensor
    type: BlockType
    how: str
    note: str


def write_gguf(
    source: Opened, dst: str, wanted: str | None, pattern_file: Any, resume: bool, dry_run: bool, told: Told | None
) -> Report:
    """See :func:`pennyweight.convert`. Raises CheckpointError, ValueError for an unknown type, OSError."""
    if wanted is not None and wanted.upper() not in FROM_FLOATS:
        raise ValueError(f"gguf_type={wanted!r} cannot be written; writable types: {', '.join(FROM_FLOATS)}")
    kind = None if wanted is None else TYPES[wanted.upper()]
    if os.path.isdir(dst):
        raise CheckpointError(dst, None, "is a folder; pass the path of a .gguf file")
    if any(os.path.realpath(dst) == os.path.realpath(f) for f in source.files):
        raise CheckpointError(dst, None, "is the source; choose another file")
    with checkpoint_errors(source.path):
        planned, left_out = _plan(source, kind, pattern_file)
        extra = rope_tensors(source.config or {})
        metadata, said = _metadata(source, planned)
        infos = {name: (p.type, p.held.kind.shape) for name, p in planned.items()}
        infos |= {name: (TYPES["F32"], tuple(t.shape)) for name, t in extra.items()}
        header, entries, size = lay_out(metadata, infos)
    rows = [
        Row(
            p.hf, "Tensor", p.held.kind.shape, "" if p.type.plain else p.type.name, "", p.held.nbytes,
            entries[name].end - entries[name].begin, note=p.note,
        )
        for name, p in planned.items()
    ]  # fmt: skip
    rows += [Row(hf, "Tensor", source.held[hf].kind.shape, "", "", source.held[hf].nbytes, 0, note=note)
             for hf, note in left_out.items()]  # fmt: skip
    report = Report("; ".join((f"{source.format} to gguf", *said)), rows, "converted")
    if dry_run:
        return report
    folder, name = os.path.split(dst)
    os.makedirs(folder, exist_ok=True)
    labels = ["gguf", hashlib.sha256(header).hexdigest(), *(f"{n}: {p.hf} {p.how}" for n, p in planned.items())]
    files = (*source.files, *method_files(folder_of(source.path)))
    progress = Progress(folder, fingerprint(files, labels, [], lambda shard: {}), f"{name}.progress.json")
    sqnr_of = _write(dst, metadata, infos, planned, extra, progress, size, resume, told)
    for row in rows:
        if row.name in sqnr_of:
            row.sqnr = sqnr_of[row.name]
            if row.sqnr == float("inf") and row.scheme:
                row.note = "exact" + (_NO_ACT if row.note.endswith(_NO_ACT) else "")
    return report


# -- planning ----------------------------------------------------------------------------------------------------------


def _plan(source: Opened, wanted: BlockType | None, pattern_file: Any) -> tuple[dict[str, Planned], dict[str, str]]:
    if source.config is None:
        raise CheckpointError(
            source.path, None, "there is no config.json, which is required to describe the model in a GGUF file"
        )
    patterns = None if pattern_file is None else read_patterns(pattern_file)
    mapped = to_gguf(source.held, source.config, patterns)
    planned: dict[str, Planned] = {}
    for hf, m in mapped.items():
        if m.name is None:
            continue
        held = moved(source.held[hf], m.transform, hf, to_gguf=True)
        one = planned[m.name] = planned_as(m.name, hf, held, wanted)
        if held.meta is not None and held.meta.act is not None:
            planned[m.name] = replace(one, note=one.note + _NO_ACT)
    return planned, {hf: m.note for hf, m in mapped.items() if m.name is None}


def planned_as(name: str, hf: str, held: StoredTensor, wanted: BlockType | None) -> Planned:
    """The type of one tensor: the requested type, or one that stores it exactly, if its rows and use allow it.

    name, hf: name in the file and in the source. Raises CheckpointError, or ValueError for a dtype without a type.
    """
    kind = held.kind
    n = kind.shape[-1] if kind.shape else 1
    meta = held.meta
    if meta is not None and meta.axes is not None:
        raise CheckpointError(None, hf, "is stored transposed, which GGUF does not support; convert to='float' first")
    numbers = meta is not None or kind.dtype in _FLOATS
    if numbers and (len(kind.shape) < 2 or name.endswith(_FLOAT32)):
        return Planned(hf, held, TYPES["F32"], "float" if meta else "copied", f"{held.shown}, as F32")
    if meta is None:
        if wanted is None or wanted.plain or kind.dtype not in _FLOATS:
            type_ = _float_type(kind, wanted)
            same_ = "it is" if type_.spec is kind.dtype else type_.name
            return Planned(hf, held, type_, "copied", f"{held.shown}, as {same_}")
        type_, why = _divides(wanted, n)
        return Planned(hf, held, type_, "quantized", why.removeprefix("; "))
    same = [t for t in TYPES.values() if t.pack is not None and t.spec == meta.spec and not meta.perm]
    if same and (wanted is None or wanted in same):
        first = next((TYPES[t] for t in _IN_ORDER if TYPES[t] in same), same[0])
        return Planned(hf, held, wanted or first, "exact", "exact")
    if wanted is None:
        for ask in ("exact", "rounded") if not meta.perm else ():
            for type_ in (TYPES[t] for t in _IN_ORDER):
                if n % type_.elements == 0 and conversion_kind(meta.spec, meta.shape, type_.spec) == ask:
                    note = "exact" if ask == "exact" else f"the codes of {meta.spec}, scales rounded"
                    return Planned(hf, held, type_, "requantized", note)
        type_, why = _divides(TYPES["Q8_0"], n)
        return Planned(hf, held, type_, "requantized", f"requantized: no type stores {meta.spec} exactly{why}")
    if wanted.plain:
        return Planned(hf, held, wanted, "float", f"dequantized from {held.shown}")
    type_, why = _divides(wanted, n)
    return Planned(hf, held, type_, "requantized", f"requantized from {held.shown}{why}")


def _divides(wanted: BlockType, n: int) -> tuple[BlockType, str]:
    """The type, or the nearest one whose blocks divide a row, with the reason."""
    for type_ in (wanted, TYPES["Q8_0"], TYPES["F16"]):
        if n % type_.elements == 0:
            return type_, "" if type_ is wanted else f"; rows of {n} are not whole blocks of {wanted.name}"
    raise AssertionError("F16 has blocks of one")


def _float_type(kind: Any, wanted: BlockType | None) -> BlockType:
    if kind.dtype not in _FLOATS:
        for type_ in TYPES.values():
            if type_.spec is kind.dtype:
                return type_
        raise ValueError(f"a tensor of {kind.dtype} has no type in GGUF")
    return wanted if wanted is not None else TYPES[_FLOATS[kind.dtype]]


def _metadata(source: Opened, planned: Mapping[str, Planned]) -> tuple[dict[str, Value], list[str]]:
    """The file's metadata, and notes on it."""
    assert source.config is not None
    size = Counter[str]()
    for p in planned.values():
        size[p.type.name] += p.held.nbytes
    file_type = FILE_TYPES.get(size.most_common(1)[0][0], 0) if size else 0
    folder = folder_of(source.path)
    if source.format == "gguf":  # its original metadata, except keys that describe the tensor types
        out = dict(source.metadata)
        return out | {"general.file_type": Value("uint32", file_type)}, []
    name = os.path.basename(folder.rstrip(os.sep))
    kv = kv_from_config(source.config, file_type, name=name or None, pooling=pooling_of(folder))
    if os.path.lexists(os.path.join(folder, "tokenizer.json")):
        tokens, said = tokenizer_kv(folder)
        kv |= tokens
    else:
        said = ["there is no tokenizer.json; llama.cpp cannot load the file without a tokenizer"]
    return {key: Value(_kind(kind), value) for key, (kind, value) in kv.items()}, said


def _kind(kind: str) -> str:
    inner = kind.removeprefix("ARRAY[")
    return f"[{inner[:-1].lower()}]" if inner != kind else kind.lower()


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(
    dst: str, metadata: Mapping[str, Value], infos: Any, planned: Mapping[str, Planned], extra: Mapping[str, Tensor],
    progress: Progress, size: int, resume: bool, told: Told | None,
) -> dict[str, float]:  # fmt: skip
    temp = f"{dst}.partial"
    remove_left_over(*os.path.split(progress.path))
    # if no tensor is complete, the header may not be either
    found = resume and progress.read() and bool(progress.done) and os.path.isfile(temp)
    if not found:
        progress.done = {}
        remove_partial(temp)
        check_room(os.path.dirname(dst), size)
        progress.write()  # before the new file is there: nothing of that is done
    writer = Writer(temp, metadata, infos, resume=found)
    try:
        for name in progress.done:
            writer.had(name, writer.entries[name].rows)
        for name, tensor in extra.items():
            if name not in progress.done:
                writer.put(name, TYPES["F32"].encode(Parts(tensor.float()), tuple(tensor.shape)))
                writer.sync()
                progress.add(name, {})
        for done, (name, p) in enumerate(planned.items()):
            if name not in progress.done:
                noise = QuantizationNoise({}, {})
                for start, raw in _encoded(p, noise):
                    writer.put(name, raw, start)
                writer.sync()
                known = {p.hf: float("inf")} if p.how == "exact" else {}
                progress.add(name, {p.hf: noise.sqnr(p.hf)} if p.hf in noise.signal else known)
            if told is not None:
                told(done + 1, len(planned), p.hf)
        writer.finish(dst)
        os.unlink(progress.path)
        sync_folder(os.path.dirname(dst))
    finally:
        writer.close()
    return {hf: v for rows in progress.done.values() for hf, v in rows.items()}


def _encoded(p: Planned, noise: QuantizationNoise) -> Iterator[tuple[int, Tensor]]:
    """(first row of the file, raw rows)."""
    shape = p.held.kind.shape
    inner = torch.Size(shape[1:-1]).numel() if len(shape) > 1 else 1
    for start, x in row_chunks(p.held, True):
        with checkpoint_errors(None, p.hf):
            raw = p.type.encode(_parts(p, x, noise), tuple(x.shape))
        yield start * inner, raw


def _parts(p: Planned, x: Tensor, noise: QuantizationNoise) -> Parts:
    spec, requantize = p.type.spec, partial(quantize, name=p.type.name)
    if isinstance(spec, torch.dtype):
        return Parts(as_float(p.hf, x, spec, noise if p.how == "float" else None))
    if isinstance(x, AffineQuantizedTensor):
        return convert_or_requantize(p.hf, x, p.how == "exact", spec, noise, requantize=requantize)
    wide = x.float()
    parts = requantize(wide)
    noise.add(p.hf, wide, sqnr(wide, dequantize(parts, spec, wide.shape)))
    return parts
