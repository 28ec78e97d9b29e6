"""``pennyweight quantize``: a checkpoint to a smaller one, disk to disk."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import Traceback, clearly
from .names import CONFIGS, build
from .sizes import parse

if TYPE_CHECKING:
    from ..models.report import Report

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@clearly
def quantize(
    model_dir: Annotated[
        str, typer.Argument(metavar="MODEL_DIR", help="A folder of safetensors files, or one such file.")
    ],
    out_dir: Annotated[
        str, typer.Argument(metavar="OUT_DIR", help="A folder: new, empty, or of this very job interrupted.")
    ],
    config: Annotated[str, typer.Option(metavar="NAME", help="Required; the names are listed below.")] = "",
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale, where the config has groups.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Leave alone: a module or parameter, the end of its name, a glob. Repeatable."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write no checkpoint.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with an interrupted job, or begin it anew.")
    ] = True,
    report_path: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the report there; - for stdout, instead of the table.")
    ] = "",
    on_indivisible: Annotated[
        str, typer.Option(help="Where groups do not divide a row: pad, largest_divisor, skip or error.")
    ] = "pad",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of one file, such as 500MB or 2GiB.")] = "4GB",
    force: Annotated[
        bool, typer.Option("--force", help="Write though OUT_DIR is not empty; a checkpoint there is replaced.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Quantize a checkpoint, disk to disk."""
    if not config:
        raise ValueError(f"--config is required: one of {', '.join(CONFIGS)}; --help says what they are")
    chosen, max_shard_bytes = build(config, group_size), parse(max_shard_size)
    check_report_path(report_path, None if dry_run else out_dir)

    from ..io import quantize_checkpoint
    from .contents import contents

    def job(**how: Any) -> Report:
        return quantize_checkpoint(
            model_dir, out_dir, chosen, skip=tuple(skip or ()), on_indivisible=on_indivisible,
            max_shard_bytes=max_shard_bytes, **how,
        )  # fmt: skip

    if os.path.realpath(model_dir) == os.path.realpath(out_dir):
        raise ValueError(f"{out_dir} is the model itself; choose another folder to write to")
    before = contents(model_dir).file_bytes
    if dry_run:
        report, after = job(dry_run=True), None
    else:
        _make_room(out_dir, force, job)
        with _progress() as told:
            try:
                report = job(resume=resume, progress=told)
            except KeyboardInterrupt:
                typer.echo("pennyweight: stopped; the same command goes on from there", err=True)
                raise typer.Exit(INTERRUPTED) from None
        after = contents(out_dir).file_bytes
    data = json.dumps({**report.to_dict(), "dry_run": dry_run, "files": {"before": before, "after": after}}, indent=2)
    if report_path == "-":
        typer.echo(data)
        return
    if report_path:
        from ..io.write import write_bytes

        write_bytes(report_path, f"{data}\n".encode())
    typer.echo(f"{report}\n{sizes(report, before, after)}")


def sizes(report: Report, before: int, after: int | None) -> str:
    """The files' true sizes in a line; of a dry run, what is known of them."""
    from ..models.report import size

    text = f"files: {before:,} bytes ({size(before)})"
    if after is None:
        return f"{text} -> about {report.bytes_after:,} bytes ({size(report.bytes_after)}); a dry run, nothing written"
    ratio = f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
    return f"{text} -> {after:,} bytes ({size(after)}), {ratio}"


def check_report_path(path: str, out_dir: str | None) -> None:
    """Raise before an hour of work, not after it. A report inside OUT_DIR is fine, though the folder is yet to come."""
    if path in ("", "-"):
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not (os.path.isdir(folder) or (out_dir and folder == os.path.abspath(out_dir))):
        raise ValueError(f"--json {path}: {'is a folder' if os.path.isdir(path) else f'there is no folder {folder}'}")


def _make_room(out_dir: str, force: bool, job: Callable[..., Report]) -> None:
    """Raise ValueError where OUT_DIR holds what this command did not put there; with ``force``, remove a checkpoint."""
    from ..io.progress import NAME
    from ..io.shards import remove_stale

    there = sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
    if not there or NAME in there:  # the writer itself tells its own interrupted job from another's
        return
    if not force:
        some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise ValueError(f"{out_dir} is not empty ({some}); choose another folder, or pass --force")
    job(dry_run=True)  # what cannot be done must not cost the old checkpoint
    remove_stale(out_dir, ())


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on stderr where that is a terminal; None, and silence, where not."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
