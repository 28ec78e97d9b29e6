"""Writes a GGUF file from a checkpoint of any format: types, metadata, tokenizer; tensor by tensor, resumable."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ...core.convert_spec import conversion_kind
from ...core.numerics import Parts, dequantize, sqnr
from ...core.tensor import AffineQuantizedTensor
from ...planning.quantize_report import Report, Row
from ...support.arguments import did_you_mean
from ..atomic_write import check_room, remove_left_over, sync_folder
from ..checkpoint import PROGRESS_ENDING
from ..config_files import folder_of, method_files
from ..file import CheckpointError, checkpoint_errors
from ..lazy_checkpoint import Opened, StoredTensor
from ..output_formats import as_float, convert_or_requantize, row_chunks
from ..resumable_write import Callback, Progress, fingerprint
from ..streaming import QuantizationNoise
from .architectures import BY_MODEL_TYPE
from .blocks import TYPES, BlockType
from .config import experts_of, kv_from_config, pooling_of, rope_tensors
from .experts import stacked
from .gguf_file import Writer, lay_out, remove_partial
from .imatrix import Imatrix, read_imatrix
from .metadata import Value
from .mixes import MIXES, PURE, Mix, mix_types
from .names import read_patterns, to_gguf
from .quantize import FROM_FLOATS, Blocks, quantize, quantize_native
from .reader import moved
from .tokenizer import KEY, NONE, tokenizer_kv

# enum llama_ftype of llama.h: the type of most tensors of a file
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip
# Types tried first for exact storage of a quantized tensor
_IN_ORDER = ("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "NVFP4", "IQ4_NL", "TQ2_0")
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32"}
# llama.cpp adds these to other tensors, and supports no quantized types there
_FLOAT32 = (
    "position_embd.weight",
    "token_types.weight",
    "_norm.weight",
    "_norm.bias",
    ".bias",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
)
_PIECE = 1 << 20  # elements of a float tensor read, quantized and written at a time
_BEHIND = 3  # pieces that wait to be written
_SYNC_BYTES = 1 << 27  # bytes after which what is written is flushed to disk and recorded for a later run
_NO_ACT = "; its activation quantization is not stored in GGUF"


@dataclass(frozen=True)
class Planned:
    """One tensor of the file. hf: its name in the source; how: as in :class:`..output_formats.OutputChoice`;
    importance: of its columns, see :meth:`.imatrix.Imatrix.importance`."""

    hf: str
    held: StoredTensor
    type: BlockType
    how: str
    note: str
    importance: Tensor | None = None


def write_gguf(
    source: Opened, dst: str, wanted: str | None, pattern_file: Any, resume: bool, dry_run: bool,
    advance: Callback | None, imatrix: Any = None,
) -> Report:  # fmt: skip
    """See :func:`pennyweight.convert`. Raises CheckpointError, ValueError for an unknown type, OSError."""
    kind = None if wanted is None else wanted_type(wanted)
    weights = None if imatrix is None else imatrix if isinstance(imatrix, Imatrix) else read_imatrix(imatrix)
    if os.path.isdir(dst):
        raise CheckpointError(dst, None, "is a folder; pass the path of a .gguf file")
    if any(os.path.realpath(dst) == os.path.realpath(f) for f in source.files):
        raise CheckpointError(dst, None, "is the source; choose another file")
    with checkpoint_errors(source.path):
        planned, left_out = _plan(source, kind, pattern_file, weights)
        extra = rope_tensors(source.config or {})
        metadata, said = _metadata(source, planned, kind)
        metadata |= {} if weights is None else _imatrix_metadata(weights)
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
    rows += [Row(hf, "Tensor", stored.kind.shape, "", "", stored.nbytes, 0, note=note) for hf, stored, note in left_out]
    report = Report("; ".join((f"{source.format} to gguf", *said)), rows, "converted")
    if dry_run:
        return report
    folder, name = os.path.split(dst)
    os.makedirs(folder, exist_ok=True)
    labels = ["gguf", hashlib.sha256(header).hexdigest(), *(f"{n}: {p.hf} {p.how}" for n, p in planned.items())]
    if weights is not None:
        labels.append(hashlib.sha256(b"".join(_moment_bytes(weights))).hexdigest())
    files = (*source.files, *method_files(folder_of(source.path)))
    progress = Progress(folder, fingerprint(files, labels, [], lambda shard: {}), f"{name}{PROGRESS_ENDING}")
    sqnr_of = _write(dst, metadata, infos, planned, extra, progress, size, resume, advance)
    for row in rows:
        if row.name in sqnr_of:
            row.sqnr = sqnr_of[row.name]
            if row.sqnr == float("inf") and row.scheme:
                row.note = "exact" + (_NO_ACT if row.note.endswith(_NO_ACT) else "")
    return report


def wanted_type(name: str) -> BlockType | Mix:
    """A mix of llama.cpp, or the type of every matrix. Raises ValueError for an unknown name.

    A name of both, such as "Q4_0", is the mix; "Q4_0-pure" is the type.
    """
    upper = name.upper()
    if upper in MIXES:
        return MIXES[upper]
    if upper.removesuffix(PURE) in FROM_FLOATS:
        return TYPES[upper.removesuffix(PURE)]
    mixes = (mix for mix in MIXES if mix not in FROM_FLOATS)
    raise ValueError(
        f"gguf_type={name!r} cannot be written{did_you_mean(name, (*MIXES, *FROM_FLOATS))}; writable types: "
        f"{', '.join(FROM_FLOATS)}; mixes: {', '.join(mixes)}"
    )


# -- planning ----------------------------------------------------------------------------------------------------------


def _plan(
    source: Opened, wanted: BlockType | Mix | None, pattern_file: Any, imatrix: Imatrix | None
) -> tuple[dict[str, Planned], list[tuple[str, StoredTensor, str]]]:
    if source.config is None:
        raise CheckpointError(
            source.path, None, "there is no config.json, which is required to describe the model in a GGUF file"
        )
    patterns = None if pattern_file is None else read_patterns(pattern_file)
    stored = stacked(source.held) if experts_of(source.config) else source.held
    mapped = to_gguf(stored, source.config, patterns)
    planned: dict[str, Planned] = {}
    all_held = {
        m.name: (hf, moved(stored[hf], m.transform, hf, to_gguf=True)) for hf, m in mapped.items() if m.name is not None
    }
    types: Mapping[str, str] = {}
    if isinstance(wanted, Mix):
        shapes = {
            name: source_tensor.kind.shape
            for name, (_, source_tensor) in all_held.items()
            if _is_matrix(name, source_tensor)
        }
        types = mix_types(wanted, shapes, _architecture(source), source.config, imatrix is not None)
    for name, (hf, source_tensor) in all_held.items():
        type_ = TYPES[types.get(name, wanted.base)] if isinstance(wanted, Mix) else wanted
        one = planned[name] = planned_as(name, hf, source_tensor, type_)
        if imatrix is not None and one.how in ("quantized", "requantized"):
            one = planned[name] = replace(one, importance=imatrix.importance(name, source_tensor.kind.shape))
        if source_tensor.meta is not None and source_tensor.meta.act is not None:
            planned[name] = replace(one, note=one.note + _NO_ACT)
    return planned, [(hf, stored[hf], m.note) for hf, m in mapped.items() if m.name is None]


def _architecture(source: Opened) -> str:
    """``general.architecture``; "" for one of a pattern file."""
    arch = BY_MODEL_TYPE.get(str((source.config or {}).get("model_type")))
    return "" if arch is None else arch.gguf


def _is_matrix(name: str, stored: StoredTensor) -> bool:
    """Whether a tensor takes the requested type: a float or quantized matrix that llama.cpp can read quantized."""
    numbers = stored.meta is not None or stored.kind.dtype in _FLOATS
    return numbers and len(stored.kind.shape) >= 2 and not name.endswith(_FLOAT32)


def planned_as(name: str, hf: str, stored: StoredTensor, wanted: BlockType | None) -> Planned:
    """The type of one tensor: the requested type, or one that stores it exactly, if its rows and use allow it.

    name, hf: name in the file and in the source. Raises CheckpointError, or ValueError for a dtype without a type.
    """
    kind = stored.kind
    n = kind.shape[-1] if kind.shape else 1
    meta = stored.meta
    if meta is not None and meta.axes is not None:
        raise CheckpointError(None, hf, "is stored transposed, which GGUF does not support; convert to='float' first")
    if (meta is not None or kind.dtype in _FLOATS) and not _is_matrix(name, stored):
        return Planned(hf, stored, TYPES["F32"], "float" if meta else "copied", f"{stored.shown}, as F32")
    if meta is None:
        if wanted is None or wanted.plain or kind.dtype not in _FLOATS:
            type_ = _float_type(kind, wanted)
            same_ = "it is" if type_.spec is kind.dtype else type_.name
            return Planned(hf, stored, type_, "copied", f"{stored.shown}, as {same_}")
        type_, why = _divides(wanted, n)
        return Planned(hf, stored, type_, "quantized", why.removeprefix("; "))
    as_stored = not (meta.perm or meta.pre_scale)
    same = [t for t in TYPES.values() if t.pack is not None and t.spec == meta.spec and as_stored]
    if same and (wanted is None or wanted in same):
        first = next((TYPES[t] for t in _IN_ORDER if TYPES[t] in same), same[0])
        return Planned(hf, stored, wanted or first, "exact", "exact")
    if wanted is None:
        for ask in ("exact", "rounded") if as_stored else ():
            for type_ in (TYPES[t] for t in _IN_ORDER):
                if n % type_.elements == 0 and conversion_kind(meta.spec, meta.shape, type_.spec) == ask:
                    note = "exact" if ask == "exact" else f"the codes of {meta.spec}, scales rounded"
                    return Planned(hf, stored, type_, "requantized", note)
        type_, why = _divides(TYPES["Q8_0"], n)
        return Planned(hf, stored, type_, "requantized", f"requantized: no type stores {meta.spec} exactly{why}")
    if wanted.plain:
        return Planned(hf, stored, wanted, "float", f"dequantized from {stored.shown}")
    type_, why = _divides(wanted, n)
    return Planned(hf, stored, type_, "requantized", f"requantized from {stored.shown}{why}")


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


def _metadata(
    source: Opened, planned: Mapping[str, Planned], wanted: BlockType | Mix | None
) -> tuple[dict[str, Value], list[str]]:
    """The file's metadata, and notes on it."""
    assert source.config is not None
    size = Counter[str]()
    for p in planned.values():
        size[p.type.name] += p.held.nbytes
    file_type = FILE_TYPES.get(size.most_common(1)[0][0], 0) if size else 0
    file_type = wanted.file_type if isinstance(wanted, Mix) else file_type
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
        kv[KEY + "model"] = ("STRING", NONE)
        said = ["there is no tokenizer.json: llama.cpp loads the file for token ids only, not for text"]
    return {key: Value(_kind(kind), value) for key, (kind, value) in kv.items()}, said


def _imatrix_metadata(imatrix: Imatrix) -> dict[str, Value]:
    """The keys that llama.cpp's quantizer writes about an importance matrix; its file without the folder."""
    return {
        "quantize.imatrix.file": Value("string", os.path.basename(imatrix.path)),
        "quantize.imatrix.dataset": Value("string", imatrix.datasets[0] if imatrix.datasets else ""),
        "quantize.imatrix.entries_count": Value("uint32", len(imatrix.moments)),
        "quantize.imatrix.chunks_count": Value("uint32", imatrix.chunks),
    }


def _moment_bytes(imatrix: Imatrix) -> Iterator[bytes]:
    for name, m in sorted(imatrix.moments.items()):
        yield name.encode()
        yield from (t.contiguous().numpy().tobytes() for t in (m.sums, m.counts))


def _kind(kind: str) -> str:
    inner = kind.removeprefix("ARRAY[")
    return f"[{inner[:-1].lower()}]" if inner != kind else kind.lower()


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(
    dst: str, metadata: Mapping[str, Value], infos: Any, planned: Mapping[str, Planned], extra: Mapping[str, Tensor],
    progress: Progress, size: int, resume: bool, advance: Callback | None,
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
    fresh: dict[str, dict[str, float]] = {}  # complete, but not yet known to be on disk
    unsynced = 0
    try:
        for name in progress.done:
            writer.had(name, writer.entries[name].rows)
        for name, tensor in extra.items():
            if name not in progress.done:
                writer.put(name, TYPES["F32"].encode(Parts(tensor.float()), tuple(tensor.shape)))
                fresh[name] = {}
        for done, (name, p) in enumerate(planned.items()):
            if name not in progress.done:
                noise = QuantizationNoise({}, {})
                with _WriteBehind(writer) as behind:
                    for start, raw in _encoded(p, noise):
                        behind.put(name, raw, start)
                known = {p.hf: float("inf")} if p.how == "exact" else {}
                fresh[name] = {p.hf: noise.sqnr(p.hf)} if p.hf in noise.signal else known
                unsynced += writer.entries[name].end - writer.entries[name].begin
                if unsynced >= _SYNC_BYTES:
                    writer.sync()
                    progress.done |= fresh
                    progress.write()
                    fresh, unsynced = {}, 0
            if advance is not None:
                advance(done + 1, len(planned), p.hf)
        writer.finish(dst)
        progress.done |= fresh
        os.unlink(progress.path)
        sync_folder(os.path.dirname(dst))
    finally:
        writer.close()
    return {hf: v for rows in progress.done.values() for hf, v in rows.items()}


class _WriteBehind:
    """Writes rows in another thread while the next are computed, a few pieces at most behind; the end waits for all."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._pool = writer, ThreadPoolExecutor(1)
        self._left: deque[Future[None]] = deque()

    def put(self, name: str, raw: Tensor, start: int) -> None:
        if len(self._left) >= _BEHIND:
            self._left.popleft().result()
        self._left.append(self._pool.submit(self._writer.put, name, raw, start))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._pool.shutdown()
        if error is None:
            for left in self._left:
                left.result()


def _pieces(stored: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a tensor. Small pieces: their memory is used again, while that of large ones is returned to
    the system, and mapping it again costs more than all else."""
    if stored.meta is not None or stored.rows is None:
        yield from row_chunks(stored, True)
        return
    shape = stored.kind.shape
    step = max(1, _PIECE // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, stored.rows(start, min(start + step, shape[0]))


def _encoded(p: Planned, noise: QuantizationNoise) -> Iterator[tuple[int, Tensor]]:
    """(first row of the file, raw rows), in order. Native code quantizes a piece in each thread: threads that share a
    piece wait for each other, which takes far longer than the work if another process has the processor."""
    shape = p.held.kind.shape
    inner = torch.Size(shape[1:-1]).numel() if len(shape) > 1 else 1

    def finished(
        start: int, x: Tensor, weights: Tensor | None, job: Future[Blocks | None] | None
    ) -> tuple[int, Tensor]:
        with checkpoint_errors(None, p.hf):
            fast = None if job is None else job.result()
            if fast is None:
                return start * inner, p.type.encode(_parts(p, x, noise, weights), tuple(x.shape))
        noise.add_sums(p.hf, fast.signal, fast.noise)
        return start * inner, fast.raw

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[tuple[int, Tensor, Tensor | None, Future[Blocks | None] | None]] = deque()
        for start, x in _pieces(p.held):
            weights = p.importance
            if weights is not None and weights.ndim > 1:
                weights = weights[start : start + x.shape[0]]
            native = p.how == "quantized"
            job = pool.submit(quantize_native, x, p.type.name, weights, 1) if native else None
            ahead.append((start, x, weights, job))
            if len(ahead) > (threads if native else 0):
                yield finished(*ahead.popleft())
        while ahead:
            yield finished(*ahead.popleft())


def _parts(p: Planned, x: Tensor, noise: QuantizationNoise, importance: Tensor | None) -> Parts:
    spec, requantize = p.type.spec, partial(quantize, name=p.type.name, importance=importance)
    if isinstance(spec, torch.dtype):
        return Parts(as_float(p.hf, x, spec, noise if p.how == "float" else None))
    if isinstance(x, AffineQuantizedTensor):
        return convert_or_requantize(p.hf, x, p.how == "exact", spec, noise, requantize=requantize)
    wide = x.float()
    parts = requantize(wide)
    noise.add(p.hf, wide, sqnr(wide, dequantize(parts, spec, wide.shape)))
    return parts
