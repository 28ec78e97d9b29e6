"""pw.quantize_checkpoint: from folder to folder in the memory of one tensor, able to go on where it was stopped."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import nn

from ..core.spec import DTYPES
from ..models.configs import AOBaseConfig, FqnToConfig
from ..models.plan import Plan, PlanRow, plan
from ..models.report import Report
from ..models.rules import Filter, PlanError
from ..models.sites import is_linear
from .checkpoint import INDEX, Checkpoint, open_checkpoint
from .container import place
from .errors import CheckpointError
from .native import Item, metadata_of
from .outline import outline, read_config
from .progress import Progress, fingerprint
from .shards import MAX_SHARD_BYTES, divide, is_ours, shard_names
from .side_files import copy_side_files, quantization_config
from .streaming import Noise, copied, quantized
from .write import Writer, index_bytes, publish, write_bytes

Told = Callable[[int, int, str], None]


@dataclass
class Job:
    """All that is decided before a byte is written."""

    source: Checkpoint
    plan: Plan
    report: Report
    shards: list[list[Item]]
    noise: Noise = field(default_factory=lambda: Noise({}, {}))
    skip: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for shard in self.shards for item in shard)


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: AOBaseConfig,
    *,
    filter_fn: Filter | None = None,
    skip: Sequence[str] = (),
    on_indivisible: str = "pad",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = True,
    dry_run: bool = False,
    progress: Told | None = None,
) -> Report:
    """Quantize a float checkpoint on disk into the format of docs/format.md, and say what happened.

    src              a folder with model.safetensors or its index, or one file
    dst              a folder, made if need be
    config           as for quantize_; which parameters are linear layers is told by config.json where transformers
                     knows the architecture, and by the tensors' names where not (the report's title says which)
    filter_fn, on_indivisible   as for quantize_
    skip             modules or parameters to leave alone: names, ends of names ("lm_head"), or globs
    max_shard_bytes  size of the files written
    resume           go on with a job that was stopped here; the result is the same, byte for byte
    dry_run          only plan and check
    progress         called with (done, total, name)

    Memory stays near the largest tensor's, below it where rows can be quantized by themselves. Small files beside the
    weights (configs, tokenizers; no code) are copied, config.json gets a "quantization_config". Raises PlanError for
    a config that does not fit, CheckpointError for a bad source or a folder that holds something else, OSError where
    the disk refuses; what is finished by then stays for ``resume``.
    """
    dst = os.path.abspath(os.fspath(dst))
    with open_checkpoint(src) as source:
        job = _decide(source, config, filter_fn, tuple(skip), on_indivisible, max_shard_bytes)
        _check_places(source, dst)
        if not dry_run:
            _carry_out(job, dst, resume, progress)
    return job.report


# -- deciding --------------------------------------------------------------------------------------------------------


def _decide(
    source: Checkpoint, config: AOBaseConfig, filter_fn: Filter | None, skip: tuple[str, ...], policy: str, size: int
) -> Job:
    if source.manifest.tensors:
        name = next(iter(source.manifest.tensors))
        raise CheckpointError(source.path, name, "is quantized already; start from the float checkpoint")
    method = (read_config(source.path) or {}).get("quantization_config")
    if method is not None:
        raise CheckpointError(source.path, None, f"config.json says it is quantized already: {str(method)[:200]}")
    model, how = outline(source)
    todo = _plan(model, config, filter_fn, skip, policy)
    todo.rows = [r for r in todo.rows if any(p.name in source.where for p in r.places) or r.call is not None]
    handled = next((r for r in todo.rows if r.call is not None), None)
    if handled is not None:
        raise PlanError(f"{handled.name}: {handled.note}; a handler needs the module: load the model and quantize_ it")
    job = Job(source, todo, todo.report(), [], skip=skip)
    job.report.config = f"{job.report.config}; {how}"
    job.shards = divide(_items(job), size)
    return job


def _plan(model: nn.Module, config: AOBaseConfig, filter_fn: Filter | None, skip: tuple[str, ...], policy: str) -> Plan:
    """The plan, less what is to be skipped."""
    words = _skipped(model, skip)
    if isinstance(config, FqnToConfig):
        left_alone = [n for n, p in model.named_parameters(remove_duplicate=False) if n in words and p.ndim > 1]
        table = {**dict.fromkeys(left_alone), **{k: v for k, v in config.fqn_to_config.items() if k not in words}}
        out = plan(model, FqnToConfig(table), filter_fn, on_indivisible=policy)
        return _noted(Plan(config, out.rows), words)
    picks = filter_fn or is_linear

    def left(module: nn.Module, name: str) -> bool:
        prefix = f"{name}." if name else ""
        return picks(module, name) and not any(prefix + n in words for n in module._parameters)

    return _noted(plan(model, config, left if words else filter_fn, on_indivisible=policy), words)


def _noted(plan: Plan, words: dict[str, str]) -> Plan:
    for row in plan.rows:
        if row.scheme is None and row.name in words:
            row.note = f"skipped by {words[row.name]!r}"
    return plan


def _skipped(model: nn.Module, skip: tuple[str, ...]) -> dict[str, str]:
    """Parameter -> the word that skips it, by its own name or that of a module it is in. PlanError for an idle word."""
    out: dict[str, str] = {}
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    for word in skip:
        hits = [n for n in names if any(_means(word, around) for around in _around(n))]
        if not hits:
            close = get_close_matches(word, {a for n in names for a in _around(n)}, n=3, cutoff=0.4)
            raise PlanError(f"skip={word!r} matches no module or parameter" + (f"; close: {close}" if close else ""))
        out |= dict.fromkeys(hits, word)
    return out


def _around(name: str) -> list[str]:
    """Of "a.b.weight": "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _means(word: str, name: str) -> bool:
    return name == word or name.endswith(f".{word}") or fnmatch.fnmatchcase(name, word)


def _items(job: Job) -> list[Item]:
    """What will be written, in the order of the source: quantized, or copied as it is."""
    source, where = job.source, job.source.where
    aliases: dict[str, list[str]] = {}
    for alias, name in source.manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    rows: dict[str, PlanRow] = {}
    for row in job.plan.rows:
        held = [p.name for p in row.places if p.name in where]
        rows[held[0]] = row
        if row.scheme is not None:
            for name in held[1:]:  # the model ties them, so one of them is stored
                aliases.setdefault(held[0], []).extend([name, *aliases.pop(name, [])])
    dropped = {name for names in aliases.values() for name in names}
    out = []
    for name in sorted(where, key=lambda n: (where[n], source.entry(n).begin, n)):
        if name in dropped:
            continue
        file, row_, also = source.files[where[name]], rows.get(name), tuple(aliases.get(name, ()))
        if row_ is None or row_.scheme is None:
            out.append(copied(file, name, also))
            continue
        dtype = source.entry(name).dtype
        if dtype not in DTYPES.values():
            raise PlanError(f"{name} is {dtype}, whose numbers mean little without scales of their own; skip it")
        out.append(quantized(file, name, row_, also, job.noise))
    return out


def _check_places(source: Checkpoint, dst: str) -> None:
    """Raise CheckpointError where writing to dst would touch the source."""
    real = os.path.realpath(dst)
    if any(os.path.dirname(file.path) == real for file in source.files) or real == os.path.realpath(source.path):
        raise CheckpointError(dst, None, "is where the source lies; choose another folder")
    if os.path.lexists(dst) and not os.path.isdir(dst):
        raise CheckpointError(dst, None, "is no folder")


# -- doing -----------------------------------------------------------------------------------------------------------


def _carry_out(job: Job, dst: str, resume: bool, told: Told | None) -> None:
    names = shard_names(len(job.shards))
    os.makedirs(dst, exist_ok=True)
    progress = _begin(job, dst, resume)
    copy_side_files(job.source.path, dst, quantization_config(job.plan.config, job.skip or None))
    active = {r.places[0].name: r for r in job.plan.active}
    total, count = len(active), 0
    for name, shard in zip(names, job.shards, strict=True):
        fresh = name not in progress.done
        if fresh:
            _write_shard(os.path.join(dst, name), shard, count, total, told)
            progress.add(name, {i.name: job.noise.sqnr(i.name) for i in shard if i.meta is not None})
        count += sum(i.meta is not None for i in shard)
        if not fresh and told is not None:
            told(count, total, name)
    if len(names) > 1:
        weight_map = {s: n for n, shard in zip(names, job.shards, strict=True) for i in shard for s in i.stored}
        write_bytes(os.path.join(dst, INDEX), index_bytes(weight_map, job.nbytes))
    os.unlink(progress.path)
    _fill_report(job, {n: v for sqnr in progress.done.values() for n, v in sqnr.items()})


def _begin(job: Job, dst: str, resume: bool) -> Progress:
    """The progress of this job in dst, on disk; room for the rest, and nothing there that is not of this job."""
    schemes = [f"{row.name}: {row.scheme!r}" for row in job.plan.rows]
    progress = Progress(dst, fingerprint(job.source, schemes, job.shards))
    found = resume and progress.read()
    there = [n for n in os.listdir(dst) if is_ours(n)]
    if not found and not os.path.lexists(progress.path) and there:
        raise CheckpointError(dst, None, f"holds a checkpoint ({min(there)}); remove it or choose another folder")
    if not found:
        for name in there:
            os.unlink(os.path.join(dst, name))
    progress.done = {n: rows for n, rows in progress.done.items() if os.path.isfile(os.path.join(dst, n))}
    for name in os.listdir(dst):
        if name.endswith(".partial") and is_ours(name.removesuffix(".partial")):
            os.unlink(os.path.join(dst, name))
    progress.write()
    names = shard_names(len(job.shards))
    need = sum(i.nbytes for n, shard in zip(names, job.shards, strict=True) if n not in progress.done for i in shard)
    free = shutil.disk_usage(dst).free
    if need > free:
        if not progress.done:
            os.unlink(progress.path)
        raise OSError(28, f"{dst}: {need} bytes are needed, {free} are free")
    return progress


def _write_shard(path: str, shard: list[Item], count: int, total: int, told: Told | None) -> None:
    temp = f"{path}.partial"
    writer = Writer(temp, place({n: kind for i in shard for n, kind in i.stored.items()}), metadata_of(shard))
    try:
        for item in shard:
            for name, start, tensor in item.make():
                writer.put(name, tensor, start)
            count += item.meta is not None
            if told is not None and item.meta is not None:
                told(count, total, item.name)
        writer.finish()
        publish(temp, path)
    finally:
        writer.close()
        with suppress(FileNotFoundError):
            os.unlink(temp)


def _fill_report(job: Job, sqnr: dict[str, float]) -> None:
    items = {item.name: item for shard in job.shards for item in shard}
    for row, out in zip(job.plan.rows, job.report.rows, strict=True):
        name = next(p.name for p in row.places if p.name in job.source.where)
        if name in items:
            out.bytes_after = items[name].nbytes
            out.sqnr = sqnr.get(name)
