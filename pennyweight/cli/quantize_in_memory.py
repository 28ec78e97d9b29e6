"""``pennyweight quantize --algorithm``: loads the model, calibrates on text, quantizes, writes the folder."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..planning.configs import AOBaseConfig
    from ..planning.quantize_report import Report

SEQUENCES, LENGTH, BATCH, FEW = 128, 512, 4, 8  # published GPTQ results use 128 sequences of 2048


def write_calibrated(
    model_dir: str, out_dir: str, config: AOBaseConfig | None, budget: tuple[list[str], int | None], algorithm: Any,
    texts: list[str], skip: tuple[str, ...], on_indivisible: str, max_shard_bytes: int, save_config: str = "",
    engine: str | None = None, dry_run: bool = False, resume: bool | None = None, progress: Any = None,
    finish: Any = None, max_memory: str = "", ranks: bool = False,
) -> Report:  # fmt: skip
    """Quantize the model of a Hugging Face folder with an algorithm, and write it. Returns the report.

    config   None: search within ``budget``: amounts, and the sequence length of the timed call; ``save_config``: file
             of the config found
    engine   as ``for_`` of quantize_
    resume   True: continue an interrupted run in out_dir; False: start again; None: keep no state to resume from
    max_memory   limit of memory: weights stay in files, see io/calibrated_streaming.py
    ranks    called on every rank of torch.distributed, with max_memory: they share the work, and the first one writes
    finish   called with the written folder and the report, before the folder is put in place

    Files are written next to out_dir and moved there atomically when complete. Raises ValueError for unreadable texts
    or folders, PlanError, CheckpointError, OSError; out_dir is then unchanged except for the state to resume from.
    """
    from ..algorithms import search
    from ..algorithms.mixed_precision.estimate_search_cost import estimate_search_cost
    from ..distributed.rank_group import RankGroup
    from ..io.calibrated_streaming import kept_state, merge_on_disk_of, quantize_mapped, write_folder
    from ..io.config_files import is_tied, quantization_config
    from ..io.meta_model import load_tokenizer
    from ..planning.configs.files import write_config
    from ..quantize import quantize_
    from ..report.evaluation_inputs import load_folder, read_texts, text_batches

    with merge_on_disk_of(out_dir) if max_memory else nullcontext():
        model = load_folder(model_dir)
    tied = is_tied(model)
    batches = None
    if texts:
        read, tokenizer = read_texts(texts), load_tokenizer(model_dir)  # files that are missing are named first
        batches = text_batches(model, tokenizer, read, batch=BATCH, length=LENGTH, limit=SEQUENCES)
        if len(batches) < FEW:  # search and tune hold some batches out
            batches = text_batches(model, tokenizer, read, batch=1, length=LENGTH, limit=SEQUENCES)
    team = RankGroup(out_dir, ranks)
    with team.share_errors(), kept_state(out_dir, None if dry_run else resume, team) as state:
        chosen, left_out = config, skip
        notes: list[str] = []
        if chosen is None and dry_run:
            cost, chosen, note = estimate_search_cost(
                model, batches or [], budget[0], max_memory or None, skip=skip,
                example=_example(model, batches or [], budget[1]), for_=engine,
            )  # fmt: skip
            notes = [note, *cost.notes(in_files=bool(max_memory))]
        elif chosen is None:
            found = search(
                model, batches or [], budget[0], skip=skip, example=_example(model, batches or [], budget[1]),
                progress=progress, for_=engine, resume=state, max_memory=max_memory or None, ranks=ranks,
            )  # fmt: skip
            if team.rank == 0:
                typer.echo(str(found), err=True)
                if save_config:
                    write_config(found.config, save_config)
            chosen, left_out = found.config, ()
        how: dict[str, Any] = {
            "skip": left_out, "calibration": batches, "algorithm": algorithm, "on_indivisible": on_indivisible,
            "dry_run": dry_run, "progress": progress, "for_": engine,
        }  # fmt: skip
        if max_memory:
            report = quantize_mapped(model, chosen, state, max_memory, team=team, **how)
        else:
            report = quantize_(model, chosen, resume=state, **how)
        report.notes[:0] = notes
        if not dry_run:
            method, card = quantization_config(chosen, skip or None), finish and partial(finish, report=report)
            write = partial(
                write_folder, model, model_dir, out_dir, method, max_shard_bytes, tied=tied, finish=card, state=state
            )
            team.first(write)
            del model, write  # some systems do not remove files that are mapped
    return report


def _example(model: Any, batches: list[Any], tokens: int | None) -> Any:
    """One sequence of ``tokens`` tokens; None: 1 for generative models, else the longest of the text."""
    from ..report.evaluation_inputs import is_causal

    longest = max(batches, key=lambda b: b["attention_mask"][0].sum())
    count = tokens or (1 if is_causal(model) else int(longest["attention_mask"][0].sum()))
    there = int(longest["attention_mask"][0].sum())
    if count > there:
        raise ValueError(f"--latency-tokens {count}: the longest sequence of --calibration has {there}")
    return {name: t[:1, :count] for name, t in longest.items()}
