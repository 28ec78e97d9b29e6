"""pw.quantize_checkpoint: quantizes a checkpoint folder one tensor at a time, and can resume an interrupted run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ..core.model_arguments import check_arguments
from ..core.spec import DTYPES
from ..planning.config_resolution import Filter, PlanError, Skip, resolve_arguments
from ..planning.configs import AOBaseConfig
from ..planning.configs.by_name import algorithm_of
from ..planning.engines import check_plan
from ..planning.plan import Plan, PlanRow, plan
from ..planning.quantize_report import Report
from ..support.progress import Progress, step
from .checkpoint import Checkpoint, open_checkpoint
from .config_files import copy_side_files, quantization_config, read_config
from .file import CheckpointError
from .meta_model import outline
from .resumable_write import Job, carry_out, check_places
from .saving import MAX_SHARD_BYTES, assign_shards
from .state_dict import Item
from .streaming import QuantizationNoise, copy_rows, quantize_rows


@dataclass
class PlannedTensor:
    """Everything decided before writing."""

    source: Checkpoint
    plan: Plan
    report: Report
    job: Job


@check_arguments()
def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: AOBaseConfig | str,
    *,
    filter_fn: Filter | None = None,
    skip: Skip = (),
    on_indivisible: str = "pad",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = True,
    dry_run: bool = False,
    progress: Progress = None,
    ranks: bool = False,
    for_: str | None = None,
    calibration: Any = None,
    algorithm: Any = None,
    max_memory: str | int | None = None,
) -> Report:
    """Quantize a float checkpoint on disk into the format of docs/format.md, and return a report.

    src              a folder with model.safetensors or its index, or one file
    dst              a folder, created if missing
    config           as for quantize_, also by name ("int4") or file ("mixed.yaml"). Linear layers are found from
                     config.json if transformers knows the architecture, else from tensor names (the report's title
                     says which)
    filter_fn, skip, on_indivisible   as for quantize_
    max_shard_bytes  maximum size of the output files
    resume           continue an interrupted run in dst; the result is byte-identical
    dry_run          only plan and validate
    progress         a bar after two seconds by default; False: none; or a function, called with (done, total, name)
    ranks            called on every rank of torch.distributed; each writes its share of the files, or with an algorithm
                     and the same calibration on all ranks solves its share of the weights. The result is
                     byte-identical to that of one process. If one rank fails or dies, all raise
    for_             as for quantize_: check first that an inference engine reads every weight
    calibration, algorithm   as for quantize_: the model of config.json runs block by block on mapped weights, and each
                     finished block goes to dst. Rewrites (awq, smooth, rotate) change a copy of the float weights in
                     dst, which must have room for it. The result has the bits of quantize_ in memory. Refused is what
                     trains all weights at once (tune, distill)
    max_memory       "6 GB": limit of the arrays of an algorithm; an error says if one block needs more

    Peak memory is about the largest tensor, less if it can be quantized by rows. Small files beside the weights
    (configs, tokenizers; no code) are copied, config.json gets a "quantization_config". Raises PlanError for a config
    that does not fit, CheckpointError for a bad source or a folder with other contents, OSError if a write fails;
    completed shards then stay for ``resume``.
    """
    dst = os.path.abspath(os.fspath(dst))
    if calibration is None and algorithm_of(config):
        raise PlanError(
            f"{config} stands for the algorithm {algorithm_of(config)}, which runs the model on calibration data; pass "
            "calibration=batches"
        )
    if calibration is not None or algorithm is not None:
        if filter_fn is not None:
            raise PlanError("filter_fn is not supported with an algorithm; use skip")
        from .calibrated_streaming import quantize_with_data

        return quantize_with_data(
            os.fspath(src), dst, config, calibration=calibration, algorithm=algorithm, max_memory=max_memory, skip=skip,
            on_indivisible=on_indivisible, max_shard_bytes=max_shard_bytes, resume=resume, dry_run=dry_run,
            progress=progress, for_=for_, ranks=ranks,
        )  # fmt: skip
    if max_memory is not None:
        raise PlanError("max_memory limits an algorithm; without one a tensor at a time is in memory: leave it out")
    chosen, skipped, policy = resolve_arguments(config, skip, on_indivisible)
    with open_checkpoint(src) as source:
        decided = _decide(source, chosen, filter_fn, skipped, policy, max_shard_bytes)
        if for_ is not None:
            decided.report.notes.append(check_plan(decided.plan.rows, for_))
        check_places([file.path for file in source.files], source.path, dst)
        if not dry_run:
            with step("quantize_checkpoint", progress) as advance:
                _fill_report(decided, carry_out(decided.job, dst, resume, advance, ranks))
    return decided.report


# -- planning --------------------------------------------------------------------------------------------------------


def _decide(
    source: Checkpoint, config: AOBaseConfig, filter_fn: Filter | None, skip: Skip, policy: str, size: int
) -> PlannedTensor:
    if source.manifest.tensors:
        name = next(iter(source.manifest.tensors))
        raise CheckpointError(source.path, name, "is already quantized; start from the float checkpoint")
    method = (read_config(source.path) or {}).get("quantization_config")
    if method is not None:
        raise CheckpointError(source.path, None, f"config.json says it is already quantized: {str(method)[:200]}")
    model, how = outline(source)
    todo = plan(model, config, filter_fn, skip=skip, on_indivisible=policy)
    todo.rows = [r for r in todo.rows if any(p.name in source.where for p in r.places) or r.call is not None]
    handled = next((r for r in todo.rows if r.call is not None), None)
    if handled is not None:
        raise PlanError(f"{handled.name}: {handled.note}; a handler needs the module: load the model and quantize_ it")
    report = todo.report()
    report.config = f"{report.config}; {how}"
    noise = QuantizationNoise({}, {})
    method = quantization_config(config, None if callable(skip) else skip or None)
    job = Job(
        tuple(file.path for file in source.files),
        [f"{row.name}: {row.scheme!r}" for row in todo.rows],
        assign_shards(_items(source, todo, noise), size),
        lambda dst: copy_side_files(source.path, dst, method),
        noise=noise,
    )
    return PlannedTensor(source, todo, report, job)


def _items(source: Checkpoint, plan: Plan, noise: QuantizationNoise) -> list[Item]:
    """The items to write, in the order of the source: quantized, or copied unchanged."""
    where = source.where
    aliases: dict[str, list[str]] = {}
    for alias, name in source.manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    rows: dict[str, PlanRow] = {}
    for row in plan.rows:
        found = [p.name for p in row.places if p.name in where]
        rows[found[0]] = row
        if row.scheme is not None:
            for name in found[1:]:  # tied in the model, so only one is stored
                aliases.setdefault(found[0], []).extend([name, *aliases.pop(name, [])])
    dropped = {name for names in aliases.values() for name in names}
    out = []
    for name in sorted(where, key=lambda n: (where[n], source.entry(n).begin, n)):
        if name in dropped:
            continue
        file, row_, also = source.files[where[name]], rows.get(name), tuple(aliases.get(name, ()))
        if row_ is None or row_.scheme is None:
            out.append(copy_rows(file, name, also))
            continue
        dtype = source.entry(name).dtype
        if dtype not in DTYPES.values():
            raise PlanError(f"{name} is {dtype}, whose values need separate scales; skip it")
        out.append(quantize_rows(file, name, row_, also, noise))
    return out


def _fill_report(decided: PlannedTensor, sqnr: dict[str, float]) -> None:
    items = {item.name: item for shard in decided.job.shards for item in shard}
    for row, out in zip(decided.plan.rows, decided.report.rows, strict=True):
        name = next(p.name for p in row.places if p.name in decided.source.where)
        if name in items:
            out.bytes_after = items[name].nbytes
            out.sqnr = sqnr.get(name)
