"""pw.convert: converts a checkpoint between formats, tensor by tensor, and reports which tensors stay exact."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..core.spec import DTYPES
from ..planning.report import Report, Row
from . import output_formats
from .atomic_write import write_bytes
from .codecs import CODECS
from .config_files import METHOD, config_bytes, copy_side_files, folder_of, method_files, quantization_config
from .detect_format import open as open_any
from .file import CheckpointError
from .lazy_checkpoint import Opened, StoredTensor
from .manifest import Meta
from .meta_model import looks_linear
from .output_formats import COPIED, EXACT, FLOAT, FLOATS, QUANTIZED, REQUANTIZED, OutputChoice, OutputFormat
from .resumable_write import Job, Told, carry_out, check_places
from .safetensors_file import Entry
from .saving import MAX_SHARD_BYTES, assign_shards
from .streaming import QuantizationNoise


def formats() -> tuple[str, ...]:
    """Formats that ``convert`` can write."""
    return ("pennyweight", "float", "gguf", *(codec.name for codec in CODECS if codec.writing is not None))


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str = "pennyweight",
    dtype: torch.dtype | None = None,
    gguf_type: str | None = None,
    imatrix: str | os.PathLike[str] | None = None,
    names: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = True,
    dry_run: bool = False,
    progress: Told | None = None,
) -> Report:
    """Convert a checkpoint of any readable format to another; report which tensors are exact and which requantized.

    src        anything :func:`open` accepts
    dst        a folder; a file for "gguf"
    to         "pennyweight", "float", "gguf", or another library's format: see :func:`formats`
    dtype      dtype for to="float"; default: the dtype each tensor represents (float32 for GGUF)
    gguf_type  a mix of llama.cpp ("Q4_K_M"), or the type of every matrix in a GGUF file ("Q4_K", "Q4_0-pure"); default:
               the type that represents them exactly, Q8_0 for quantized matrices without one, floats unchanged
    imatrix    an importance matrix of llama.cpp for a GGUF file: weights of the columns' errors; see docs/formats.md
    names      a TOML file with tensor names, for GGUF files of an unknown architecture: see docs/formats.md
    allow_pickle   see :func:`open`
    resume     continue an interrupted run in dst; the result is byte-identical
    dry_run    only plan and validate

    A tensor that the target format can represent exactly keeps its numbers. If only its scales must be rounded to
    another dtype, the codes stay unchanged; otherwise it is requantized from its values. ``report.rows`` give the SQNR
    against the source (inf: exact). Peak memory is about the largest tensor, less where it can be read by rows. Raises
    CheckpointError for a bad source or a folder with other contents, ValueError for unknown options, OSError if a write
    fails.
    """
    to = {"native": "pennyweight", "safetensors": "float"}.get(to, to)
    if to not in formats():
        raise ValueError(f"cannot write {to!r}; writable formats: {', '.join(formats())}")
    if dtype is not None and (to != "float" or dtype not in DTYPES.values()):
        raise ValueError(f"dtype={dtype} is only valid with to='float'; must be one of {', '.join(DTYPES)}")
    if gguf_type is not None and to != "gguf":
        raise ValueError(f"gguf_type={gguf_type!r} is only valid with to='gguf', not {to!r}")
    if imatrix is not None and gguf_type is None:
        raise ValueError("imatrix= is only valid with to='gguf' and gguf_type=")
    dst = os.path.abspath(os.fspath(dst))
    with open_any(src, allow_pickle=allow_pickle) as found:
        source = found
        if found.format == "gguf":
            from .gguf.reader import under_hf_names

            source = under_hf_names(found, names)
        if to == "gguf":
            from .gguf.export import write_gguf

            return write_gguf(source, dst, gguf_type, names, resume, dry_run, progress, imatrix)
        check_places(source.files, source.path, dst)
        target = _target(to, dtype)
        job, report, chosen = _decide(source, target, max_shard_bytes)
        if not dry_run:
            fill(report, chosen, carry_out(job, dst, resume, progress))
    return report


def _target(to: str, dtype: torch.dtype | None) -> OutputFormat:
    if to == "pennyweight":
        return output_formats.native_target(quantization_config(None))
    if to == "float":
        return output_formats.float_target(dtype)
    codec = next(codec for codec in CODECS if codec.name == to)
    assert codec.writing is not None
    return output_formats.foreign_target(to, codec.writing)


def _decide(source: Opened, target: OutputFormat, size: int) -> tuple[Job, Report, dict[str, OutputChoice]]:
    aliases = source.aliases
    held = dict(source.held)
    if not target.aliases:
        # other readers tie the tensors that this file holds under two names only if config.json says so
        if source.config is None or source.config.get("tie_word_embeddings") is False:
            held |= {alias: source.held[name] for alias, name in aliases.items()}
        aliases = {}
    chosen = {name: target.choose(name, h) for name, h in held.items()}
    metas = {name: c.kind for name, c in chosen.items() if isinstance(c.kind, Meta)}
    if not metas and target.holds == QUANTIZED:
        lost = next(((n, c.why) for n, c in chosen.items() if c.how == FLOAT), None)
        if lost is None:
            raise CheckpointError(
                source.path, None, f"contains no quantized tensors to write as {target.name}; quantize it first"
            )
        raise CheckpointError(
            source.path, lost[0], f"no tensor can stay quantized as {target.name}: {lost[1]}; "
            "convert with to='float' and quantize the result"
        )  # fmt: skip
    plain = tuple(n for n, c in chosen.items() if isinstance(c.kind, Entry) and looks_linear(n, c.kind))
    method = target.method(metas, plain) if metas else None
    also: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        also.setdefault(name, []).append(alias)
    noise = QuantizationNoise({}, {})
    items = [
        output_formats.planned_item(target, name, held[name], choice, tuple(also.get(name, ())), noise)
        for name, choice in chosen.items()
    ]
    job = Job(
        (*source.files, *method_files(folder_of(source.path))),
        [target.name, *(f"{name}: {choice}" for name, choice in chosen.items())],
        assign_shards(items, size),
        side_files(source, method, _told_dtype(chosen) if target.holds == FLOATS else None),
        target.metadata,
        noise,
    )
    after = {item.name: item.nbytes for item in items}
    rows = [_row(name, held[name], choice, after[name]) for name, choice in chosen.items()]
    return job, Report(f"{source.format} to {target.name}", rows, "converted"), chosen


def _told_dtype(chosen: Mapping[str, OutputChoice]) -> torch.dtype | None:
    """The dtype of most elements of a float checkpoint; None if dtypes are unchanged."""
    if all(c.how == COPIED and not c.why for c in chosen.values()):
        return None
    size = Counter[torch.dtype]()
    for choice in chosen.values():
        size[choice.kind.dtype] += math.prod(choice.kind.shape)
    return max(size.keys() & set(DTYPES.values()), key=lambda dtype: size[dtype], default=None)


def side_files(source: Opened, method: dict[str, Any] | None, dtype: torch.dtype | None) -> Callable[[str], object]:
    """Writes config.json, tokenizer etc. into a folder. dtype: dtype of all floats; None: unchanged."""
    folder = folder_of(source.path)

    def write(dst: str) -> None:
        if source.format == "gguf":
            from .gguf.reader import write_side_files

            copied = write_side_files(source, dst, method, dtype)
        else:
            copied = copy_side_files(folder, dst, method, dtype)
        if method is not None and method["quant_method"] != METHOD and "config.json" not in copied:
            # without it a reader cannot tell the format
            write_bytes(os.path.join(dst, "config.json"), config_bytes({}, method))

    return write


def _row(name: str, held: StoredTensor, choice: OutputChoice, after: int) -> Row:
    kind = choice.kind
    scheme = str(kind.spec) if isinstance(kind, Meta) else _word(kind) if choice.how == FLOAT else ""
    note = {EXACT: "exact", COPIED: f"{_word(kind)}, as it is" if not choice.why else choice.why}
    text = note.get(choice.how, choice.why if choice.how == FLOAT else f"{choice.how} from {held.shown}: {choice.why}")
    return Row(name, "Tensor", held.kind.shape, scheme, "", held.nbytes, after, note=text)


def fill(report: Report, chosen: Mapping[str, OutputChoice], sqnr: Mapping[str, float]) -> None:
    """Fill in the results of each row after writing."""
    for row in report.rows:
        choice = chosen[row.name]
        if choice.how == EXACT:
            row.sqnr = float("inf")
        elif row.name in sqnr:
            row.sqnr = sqnr[row.name]
            if choice.how == REQUANTIZED and row.sqnr == float("inf"):
                row.note = "exact"


def _word(kind: Any) -> str:
    return str(kind.dtype).removeprefix("torch.")
