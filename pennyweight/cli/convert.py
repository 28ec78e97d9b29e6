"""``pennyweight convert``: converts a checkpoint to another format, disk to disk."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import (
    Traceback,
    check_report_path,
    output_folder,
    print_report,
    progress_bar,
    publish_output,
    report_errors,
    resume_hint,
)

if TYPE_CHECKING:
    from ..planning.report import Report


@report_errors
def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format: a folder, a file, a Hub id.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="A folder; a file for gguf.")],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="Required without --for; see docs/formats.md for the formats.")
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            "--for", metavar="ENGINE", help="The format that vllm, vllm-gpu, llama.cpp or transformers reads best."
        ),
    ] = "",
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Round weights again even if an algorithm such as GPTQ chose them.")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="For --to float: float32, float16, bfloat16.")] = "",
    gguf_type: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="Mix of llama.cpp or type for a GGUF file: q4_k_m, q8_0.")
    ] = "",
    imatrix: Annotated[
        str, typer.Option(metavar="FILE", help="Importance matrix of llama.cpp for the --type of a GGUF file.")
    ] = "",
    names: Annotated[
        str, typer.Option(metavar="FILE", help="TOML file with tensor names for an unknown GGUF architecture.")
    ] = "",
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read torch.save files; only from sources you trust.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run, or start again.")
    ] = True,
    report_path: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - for stdout, without the table.")
    ] = "",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Maximum size of a file, such as 500MB or 2GiB.")
    ] = "4GB",
    force: Annotated[
        bool, typer.Option("--force", help="Write even if DST exists; replaces a checkpoint there.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Convert a checkpoint, disk to disk.

    Reports for each tensor whether it is exact or was requantized, and the error.
    """
    from ..core.spec import DTYPES
    from ..io import convert as run
    from ..io import local_path
    from ..io.convert_checkpoint import formats
    from ..planning.engines import GGUF, engine_of
    from ..planning.report import nbytes_of
    from .inspect import contents
    from .model_card import renew_card

    if not (to or engine):
        raise ValueError(f"--to is required: one of {', '.join(formats())}; or --for an engine")
    if engine and engine_of(engine).formats == (GGUF,):
        to = to or GGUF
    if dtype and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    size = nbytes_of(max_shard_size)
    src = local_path(src, allow_pickle)

    def job(folder: str = dst, **how: Any) -> Report:
        return run(
            src, folder, to=to or "pennyweight", for_=engine or None, requantize=requantize,
            dtype=DTYPES[dtype] if dtype else None, gguf_type=gguf_type or None, imatrix=imatrix or None,
            names=names or None, allow_pickle=allow_pickle, max_shard_bytes=size, **how,
        )  # fmt: skip

    check_report_path(report_path, None if dry_run or to == "gguf" else dst)
    before = contents(src, allow_pickle).file_bytes
    if dry_run:
        print_report(job(dry_run=True), before, None, report_path)
        return
    folder = dst
    if to != "gguf":
        folder = output_folder(dst, force, job, resume)
    elif os.path.lexists(dst) and not force:
        raise ValueError(f"{dst} already exists; choose another file, or pass --force")
    with progress_bar() as told, resume_hint():
        report = job(folder, resume=resume, progress=told)
    if to not in ("gguf", "float"):
        renew_card(folder, dst, src)
    publish_output(folder, dst)
    print_report(report, before, contents(dst).file_bytes, report_path)
    for note in report.notes:
        if note.startswith("warning: "):
            typer.echo(f"pennyweight: {note}", err=True)
