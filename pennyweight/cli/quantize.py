"""``pennyweight quantize``: quantizes a checkpoint, disk to disk."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..planning.config_names import CONFIGS, algorithm_of
from .evaluate import check_bound, check_room, run_gated
from .options import (
    Algorithm,
    Budget,
    Calibration,
    Card,
    Config,
    DryRun,
    EmbeddingConfig,
    Force,
    GroupSize,
    Json,
    LatencyTokens,
    LayerConfig,
    MaxKL,
    MaxMemory,
    MaxShardSize,
    OnIndivisible,
    ReadBy,
    Resume,
    SaveConfig,
    Skip,
    Texts,
    Traceback,
)
from .output import (
    check_report_path,
    is_first_rank,
    output_folder,
    over_ranks,
    print_report,
    progress_bar,
    publish_output,
    report_errors,
    resume_hint,
    shard_bytes,
    world,
)

if TYPE_CHECKING:
    from ..planning.quantize_report import Report
    from ..report import Comparison


_width = max(map(len, CONFIGS))
EPILOG = """Examples:
  pennyweight quantize Qwen/Qwen3-0.6B small --config int4
  pennyweight quantize MODEL_DIR OUT_DIR --config int4 --group-size 64 --skip lm_head --dry-run
  pennyweight quantize MODEL_DIR OUT_DIR --config w4a16 --layer '*.down_proj=int8' --for vllm
  pennyweight quantize MODEL_DIR OUT_DIR --config int4 --calibration text.txt
  pennyweight quantize MODEL_DIR OUT_DIR --budget "4.25 bpw" --calibration text.txt --max-memory 6GB

Configs:
""" + "\n".join(f"  {name:<{_width}}  {entry.text}" for name, entry in CONFIGS.items())


@report_errors
def quantize(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A folder of safetensors files, one such file, or a Hub id.")
    ],
    out_dir: Annotated[
        str, typer.Argument(metavar="OUT_DIR", help="A folder: new, empty, or an interrupted run of the same command.")
    ],
    config: Config = "",
    layer: LayerConfig = None,
    embeddings: EmbeddingConfig = "",
    save_config: SaveConfig = "",
    engine: ReadBy = "",
    group_size: GroupSize = None,
    skip: Skip = None,
    dry_run: DryRun = False,
    resume: Resume = True,
    report_path: Json = "",
    on_indivisible: OnIndivisible = "pad",
    max_shard_size: MaxShardSize = "4GB",
    algorithm: Algorithm = "",
    calibration: Calibration = None,
    budget: Budget = None,
    latency_tokens: LatencyTokens = None,
    max_memory: MaxMemory = "",
    max_kl: MaxKL = None,
    text: Texts = None,
    force: Force = False,
    card: Card = True,
    traceback: Traceback = False,
) -> None:
    """Quantize a checkpoint, disk to disk.

    With --algorithm or --budget the model is loaded and run on --calibration; with --max-memory its weights stay in
    files, and one block at a time is in memory. With --max-kl both models are loaded and
    run on --text, and nothing is written unless the KL passes.

    torchrun --nproc-per-node N -m pennyweight quantize ... divides the files among N processes, and with --max-memory
    the weights of each block and the trials of --budget. The result is that of one process.
    """
    from ..planning.configs.by_name import by_name
    from ..planning.configs.files import is_config_file, layer_config, read_config, write_config

    by_layer = bool(layer or embeddings)
    if not (config or budget or by_layer):
        raise ValueError("--config is required, such as int8, int8-dynamic, int4 or mxfp4; --help lists them all")
    if (config or by_layer) and budget:
        raise ValueError("--budget chooses the config of each layer; leave out --config, --layer and --embeddings")
    if budget and not calibration:
        raise ValueError("--budget measures the loss of each layer; pass text with --calibration")
    if algorithm_of(config) and not (calibration or algorithm):
        raise ValueError(
            f"--config {config} stands for --algorithm {algorithm_of(config)}, which needs text: pass --calibration"
        )
    if not (algorithm or budget) and (calibration or algorithm_of(config)):
        algorithm = algorithm_of(config) or "auto"
    if latency_tokens is not None and not (budget and latency_tokens > 0):
        raise ValueError("--latency-tokens must be positive and needs --budget")
    if budget and group_size is not None:
        raise ValueError("--group-size needs --config; --budget chooses the group size too")
    if max_memory and not (algorithm or budget):
        raise ValueError(
            "--max-memory is for --algorithm and --budget: without them one tensor is in memory at a time; leave it out"
        )
    if group_size is not None and (not config or is_config_file(config)):
        raise ValueError("--group-size belongs to a --config given by its name")
    if save_config and budget and dry_run:
        raise ValueError("--save-config writes the config that --budget finds; leave it out, or --dry-run")
    if save_config and not is_config_file(save_config):
        raise ValueError(f"--save-config {save_config}: the name of a config file must end in .yaml, .yml or .json")
    given = read_config(config) if is_config_file(config) else by_name(config, group_size) if config else None
    chosen = None if budget else layer_config(layer or (), embeddings or None, given)
    max_shard_bytes = shard_bytes(max_shard_size)
    check_report_path(report_path, None if dry_run else out_dir)
    check_bound(max_kl)
    if (max_kl is None) != (not text):
        raise ValueError("--max-kl and --text must be used together: the limit, and the text to measure on")
    if max_kl is not None and dry_run:
        raise ValueError("--max-kl checks the written files; leave out --dry-run")

    several = world() > 1
    if several and (max_kl is not None or ((algorithm or budget) and not max_memory)):
        raise ValueError(
            "--algorithm, --budget and --max-kl run the model in one process; start without torchrun, or give "
            "--max-memory to --algorithm and --budget: processes then share the weights of each block, and the trials "
            "of the search"
        )

    from ..distributed.rank_group import RankGroup
    from ..io import local_path, quantize_checkpoint
    from .inspect import contents
    from .model_card import write_card

    named, model_dir = model_dir, local_path(model_dir)

    def learned(folder: str = out_dir, **how: Any) -> Report:
        from .quantize_in_memory import write_calibrated

        recipe = algorithm if algorithm.endswith((".yaml", ".yml")) else [s for s in algorithm.split("+") if s]
        return write_calibrated(
            model_dir, folder, chosen, (budget or [], latency_tokens), recipe or "auto", calibration or [],
            tuple(skip or ()), on_indivisible, max_shard_bytes, save_config, engine or None, max_memory=max_memory,
            ranks=several and not how.get("dry_run"), **how,
        )  # fmt: skip

    def job(folder: str = out_dir, **how: Any) -> Report:
        if algorithm or budget:
            return learned(folder, **how)
        assert chosen is not None
        return quantize_checkpoint(
            model_dir, folder, chosen, skip=tuple(skip or ()), on_indivisible=on_indivisible,
            max_shard_bytes=max_shard_bytes, ranks=several and not how.get("dry_run"), for_=engine or None, **how,
        )  # fmt: skip

    if os.path.realpath(model_dir) == os.path.realpath(out_dir):
        raise ValueError(f"{out_dir} is the input folder; choose another folder to write to")
    before = contents(model_dir).file_bytes

    def finish(folder: str, report: Report, compared: Comparison | None = None) -> None:
        write_card(folder, out_dir, card, (named, model_dir), report, before, compared)

    if dry_run:
        report, after = job(dry_run=True), None
    elif max_kl is not None:
        with progress_bar() as advance:
            report = run_gated(
                lambda folder: job(folder, progress=advance), model_dir, out_dir, force, max_kl, text or [], finish
            )
        after = contents(out_dir).file_bytes
    elif algorithm or budget:
        from ..io.calibrated_streaming import STATE, is_written

        resumes = not budget or bool(max_memory)  # a search in memory keeps nothing
        with over_ranks():
            ours = force or (resume and is_written(out_dir))
            RankGroup(out_dir, several).first(lambda: check_room(out_dir, ours, but=STATE))
            with (
                progress_bar() if is_first_rank() else nullcontext() as advance,
                resume_hint() if resumes else nullcontext(),
            ):
                report = learned(
                    progress=advance if is_first_rank() else False, resume=resume if resumes else None, finish=finish
                )
        after = contents(out_dir).file_bytes
    else:
        with over_ranks():
            folder = RankGroup(out_dir, several).first(lambda: output_folder(out_dir, force, job, resume))
            with progress_bar() if is_first_rank() else nullcontext() as advance, resume_hint():
                report = job(folder, progress=advance, resume=resume)
            if is_first_rank():
                finish(folder, report)
                publish_output(folder, out_dir)
        after = contents(out_dir).file_bytes
    if is_first_rank():
        if save_config and chosen is not None:
            write_config(chosen, save_config)
        print_report(report, before, after, report_path)
