"""pw.convert: converts a checkpoint between formats, tensor by tensor, and reports which tensors stay exact."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.describe_spec import describe, shorten
from ..core.model_arguments import check_arguments
from ..core.spec import DTYPES
from ..planning.engines import GGUF, ONNX, Refuses, check_fused, engine_of, refusal, verdict
from ..planning.quantize_report import ALGORITHM, Report, Row
from ..planning.scheme import Scheme
from ..support.arguments import did_you_mean
from ..support.progress import Progress, step
from . import output_formats
from .activation_order import undo_activation_order
from .atomic_write import write_bytes
from .codecs import CODECS
from .config_files import METHOD, config_bytes, copy_side_files, folder_of, method_files, quantization_config
from .detect_format import open as open_any
from .file import CheckpointError
from .lazy_checkpoint import NEAREST, Opened, StoredTensor
from .manifest import Meta
from .meta_model import looks_linear
from .output_formats import COPIED, EXACT, FLOAT, FLOATS, QUANTIZED, REQUANTIZED, OutputChoice, OutputFormat
from .resumable_write import Job, carry_out, check_places
from .safetensors_file import Entry
from .saving import MAX_SHARD_BYTES, assign_shards
from .state_dict import Item
from .streaming import QuantizationNoise

_KEEPS_ORDER = tuple(codec.name for codec in CODECS if codec.writing is not None and codec.writing.perm)


def formats() -> tuple[str, ...]:
    """Formats that ``convert`` can write."""
    return ("pennyweight", "float", "gguf", *(codec.name for codec in CODECS if codec.writing is not None))


@check_arguments()
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
    progress: Progress = None,
    for_: str | None = None,
    requantize: bool = False,
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
    progress   a bar after two seconds by default; False: none; or a function, called with (done, total, name)
    for_       an inference engine ("vllm", "llama.cpp", ...) in place of ``to``: the file format from which it reads
               most weights exactly. A weight that it does not read raises; see planning/engines.py
    requantize permit rounding a weight again whose codes an algorithm chose (gptq, awq, hqq, ...)

    A tensor that the target format can represent exactly keeps its numbers. If only its scales must be rounded to
    another dtype, the codes stay unchanged; otherwise it is requantized from its values. ``report.rows`` give the SQNR
    against the source (inf: exact), ``report.notes`` how many numbers changed. Where an algorithm chose the codes,
    which the files of this library record and those of GPTQ, AWQ and HQQ imply, requantizing would lose its work: it
    raises unless ``requantize``. Peak memory is about the largest tensor, less where it can be read by rows. Raises
    CheckpointError for a bad source or a folder with other contents, ValueError for unknown options, OSError if a write
    fails.

    >>> import tempfile, torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    >>> report = pw.quantize_(model, pw.Int8WeightOnlyConfig())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pw.save(model, f"{folder}/ours")
    ...     report = pw.convert(f"{folder}/ours", f"{folder}/theirs", to="compressed-tensors")
    >>> [(row.name, row.sqnr) for row in report.quantized]
    [('0.weight', inf)]
    """
    to = {"native": "pennyweight", "safetensors": "float"}.get(to, to)
    if for_ is not None and engine_of(for_).formats == (GGUF,) and to == "pennyweight":
        to = "gguf"
    if to not in formats():
        guess = did_you_mean(to, formats())
        raise ValueError(f"to={to!r}: cannot write this format{guess}; writable formats: {', '.join(formats())}")
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
        keeps = to in ("pennyweight", "float") and for_ is None
        source, unordered = (source, []) if keeps or to in _KEEPS_ORDER else undo_activation_order(source)
        if to == "gguf":
            from .gguf.export import write_gguf

            options = (source, dst, gguf_type, names, resume)
            planned = write_gguf(*options, True, None, imatrix)
            lost = [row.name for row in planned.rows if row.note.startswith(REQUANTIZED)]
            _check_algorithm(found, lost, "GGUF", requantize)
            if dry_run:
                return planned
            with step("convert", progress) as advance:
                report = write_gguf(*options, False, advance, imatrix)
            report.notes += [*_order_note(unordered), *_requantized_note(report, {})]
            return report
        check_places(source.files, source.path, dst)
        target = _target(to, dtype) if for_ is None else _target_for(source, for_, to)
        job, report, chosen = _decide(source, target, max_shard_bytes)
        again = [name for name, choice in chosen.items() if choice.how == REQUANTIZED and not choice.codes]
        _check_algorithm(source, again, target.name, requantize)
        if not dry_run:
            with step("convert", progress) as advance:
                fill(report, chosen, carry_out(job, dst, resume, advance))
            report.notes += [*_order_note(unordered), *_requantized_note(report, job.noise.changed)]
    return report


# -- codes that an algorithm chose -------------------------------------------------------------------------------------


def _check_algorithm(source: Opened, again: Sequence[str], target: str, permitted: bool) -> None:
    """Raise CheckpointError if weights whose codes an algorithm chose would be rounded again."""
    algorithm = source.algorithm
    if algorithm and again and not permitted:
        raise CheckpointError(
            source.path, again[0], f"{algorithm} chose its codes, and {target} cannot store them: this weight and "
            f"{len(again) - 1} more would be rounded to nearest again; pass requantize=True if that is wanted"
        )  # fmt: skip


def _order_note(unordered: Sequence[str]) -> list[str]:
    if not unordered:
        return []
    return [f"activation order undone in {len(unordered)} weights such as {unordered[0]}: the layers before them have "
            "their outputs in that order; the model computes the same"]  # fmt: skip


def _requantized_note(report: Report, changed: Mapping[str, int]) -> list[str]:
    """A warning with the numbers, if weights were rounded again."""
    rows = [row for row in report.rows if row.note.startswith(REQUANTIZED) and row.sqnr is not None]
    if not rows:
        return []
    worst = min(rows, key=lambda row: row.sqnr or 0.0)
    moved = sum(changed[row.name] for row in rows if row.name in changed)
    total = sum(math.prod(row.shape) for row in rows if row.name in changed)
    share = f", {moved:,} of {total:,} numbers changed" if total else ""
    return [
        f"warning: {len(rows)} weights were rounded again{share}; SQNR against the source {worst.sqnr:.1f} dB in the "
        f"worst, {worst.name}"
    ]


# -- output for an engine ----------------------------------------------------------------------------------------------


def _target_for(source: Opened, engine: str, to: str) -> OutputFormat:
    """The output for an engine: the first of its formats that stores every weight, else its preferred one. Raises
    CheckpointError for a weight that the engine does not read, ValueError for a format that it does not read."""
    known = engine_of(engine)
    if ONNX in known.formats:
        raise ValueError(f"{known.title} reads ONNX files: pennyweight export-onnx SRC model.onnx")
    formats = known.formats if to == "pennyweight" else (to,)
    if to not in ("pennyweight", *known.formats):
        raise ValueError(f"{known.title} does not read to={to!r}; it reads {', '.join(known.formats)}")
    targets = [_readable(_target(name, None), engine) for name in formats]
    exact = [not any(_changes(target, name, stored) for name, stored in source.held.items()) for target in targets]
    target = targets[exact.index(True)] if True in exact else targets[0]
    _check_engine(source, target, engine)
    return target


def _changes(target: OutputFormat, name: str, stored: StoredTensor) -> bool:
    """Whether the target cannot store the weight of a linear layer exactly in a form without activation order."""
    if stored.meta is None or not linear_like(name, stored):
        return False
    choice = target.choose(name, stored)
    return choice.how != EXACT or (isinstance(choice.kind, Meta) and choice.kind.perm)


def linear_like(name: str, stored: StoredTensor) -> bool:
    """Whether a stored tensor is the weight of a linear layer, by its name and shape."""
    return looks_linear(name, Entry(stored.kind.dtype, stored.kind.shape))


def _readable(target: OutputFormat, engine: str) -> OutputFormat:
    """The target, with floats for what the engine reads only as floats: embeddings, experts, convolutions."""

    def choose(name: str, stored: StoredTensor) -> OutputChoice:
        if stored.meta is not None and not linear_like(name, stored):
            found = verdict(engine, _scheme(stored.meta), stored.meta.stored_shape, _op(stored.meta))
            if isinstance(found, Refuses) and found.nearest == "none":
                return OutputChoice(Entry(stored.kind.dtype, stored.kind.shape), FLOAT, found.why)
        return target.choose(name, stored)

    return replace(target, choose=choose)


def _op(meta: Meta) -> str:
    return {2: "embedding", 3: "bmm"}.get(len(meta.shape), "convolution")


def _scheme(meta: Meta) -> Scheme:
    static = meta.act is not None and meta.act.mode == "static"
    zero = 0 if static and meta.act is not None and meta.act.spec.zero_point else None
    return Scheme(meta.spec, meta.act, act_scale=1.0 if static else None, act_zero_point=zero)


def _check_engine(source: Opened, target: OutputFormat, engine: str) -> None:
    """Raise CheckpointError for a weight that the engine does not read as the target would store it, and for parts of a
    fused layer with different schemes."""
    schemes: dict[str, Scheme | None] = {}
    for name, stored in source.held.items():
        if not linear_like(name, stored):
            continue
        kind = target.choose(name, stored).kind
        if isinstance(kind, Meta) and kind.perm:
            raise CheckpointError(
                source.path, name, f"{engine_of(engine).title} does not read {target.name} files with activation order "
                "(desc_act); leave out to= for a format without it"
            )  # fmt: skip
        scheme = schemes[name.rpartition(".")[0]] = _scheme(kind) if isinstance(kind, Meta) else None
        found = None if scheme is None else verdict(engine, scheme, stored.kind.shape)
        if scheme is not None and isinstance(found, Refuses):
            raise CheckpointError(source.path, name, refusal(engine, name, scheme, found).removeprefix(f"{name}: "))
    fused = check_fused(engine, schemes)
    if fused:
        raise CheckpointError(source.path, None, fused)


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
    stored = dict(source.held)
    if not target.aliases:
        # other readers tie the tensors that this file holds under two names only if config.json says so
        if source.config is None or source.config.get("tie_word_embeddings") is False:
            stored |= {alias: source.held[name] for alias, name in aliases.items()}
        aliases = {}
    chosen = {name: target.choose(name, h) for name, h in stored.items()}
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
        output_formats.planned_item(target, name, stored[name], choice, tuple(also.get(name, ())), noise)
        for name, choice in chosen.items()
    ]
    job = Job(
        (*source.files, *method_files(folder_of(source.path))),
        [target.name, *(f"{name}: {choice}" for name, choice in chosen.items())],
        assign_shards(items, size),
        side_files(source, method, _told_dtype(chosen) if target.holds == FLOATS else None),
        _with_algorithm(target, source.algorithm if metas else ""),
        noise,
    )
    after = {item.name: item.nbytes for item in items}
    rows = [_row(name, stored[name], choice, after[name]) for name, choice in chosen.items()]
    return job, Report(f"{source.format} to {target.name}", rows, "converted"), chosen


def _with_algorithm(target: OutputFormat, algorithm: str) -> Callable[[list[Item]], dict[str, str]]:
    """Metadata that say which algorithm chose the codes; of other formats also that none did."""
    known = algorithm or ("" if target.name == METHOD or target.holds == FLOATS else NEAREST)
    extra = {ALGORITHM: known} if known else {}
    return lambda shard: {**target.metadata(shard), **extra}


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


def _row(name: str, stored: StoredTensor, choice: OutputChoice, after: int) -> Row:
    kind = choice.kind
    scheme = str(kind.spec) if isinstance(kind, Meta) else _word(kind) if choice.how == FLOAT else ""
    note = {EXACT: "exact", COPIED: f"{_word(kind)}, as it is" if not choice.why else choice.why}
    again = f"the codes of {stored.shown}, scales rounded" if choice.codes else f"{choice.how} from {stored.shown}"
    again += "; inputs are not quantized" if choice.drops_inputs else ""
    text = note.get(choice.how, choice.why if choice.how == FLOAT else f"{again}: {choice.why}")
    row = Row(name, "Tensor", stored.kind.shape, scheme, "", stored.nbytes, after, note=text)
    if isinstance(kind, Meta):
        rank = len(kind.shape)
        row.scheme_text, row.scheme_short = describe(kind.spec, rank), shorten(kind.spec, kind.act, rank)
    return row


def fill(report: Report, chosen: Mapping[str, OutputChoice], sqnr: Mapping[str, float]) -> None:
    """Fill in the results of each row after writing."""
    for row in report.rows:
        choice = chosen[row.name]
        if choice.how == EXACT:
            row.sqnr = float("inf")
        elif row.name in sqnr:
            row.sqnr = sqnr[row.name]
            if choice.how == REQUANTIZED and row.sqnr == float("inf"):
                row.note = f"exact weight; inputs are not quantized: {choice.why}" if choice.drops_inputs else "exact"


def _word(kind: Any) -> str:
    return str(kind.dtype).removeprefix("torch.")
