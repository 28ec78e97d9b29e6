"""What commands share that work from disk to disk: room in the folder, a progress bar, the report at the end."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..quantize.report import Report

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def print_report(report: Report, before: int, after: int | None, report_path: str) -> None:
    """Print the report and the files' true sizes, and write it as JSON where asked to. after None: a dry run."""
    files = {"before": before, "after": after}
    data = json.dumps({**report.to_dict(), "dry_run": after is None, "files": files}, indent=2)
    if report_path == "-":
        typer.echo(data)
        return
    if report_path:
        from ..io.atomic_write import write_bytes

        write_bytes(report_path, f"{data}\n".encode())
    typer.echo(f"{report}\n{file_sizes(report, before, after)}")


@contextmanager
def resume_hint() -> Iterator[None]:
    """Ctrl-C ends in a line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("pennyweight: stopped; the same command goes on from there", err=True)
        raise typer.Exit(INTERRUPTED) from None


def file_sizes(report: Report, before: int, after: int | None) -> str:
    """The files' true sizes in a line; of a dry run, what is known of them."""
    from ..quantize.report import size

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


def output_folder(out_dir: str, force: bool, job: Callable[..., Report], resume: bool = True) -> str:
    """The folder that a job is to write to: OUT_DIR, or one beside it where OUT_DIR holds what is to be replaced. What
    an interrupted job has left in that one stays if ``resume``.

    Raises ValueError where OUT_DIR holds what this command did not put there, unless ``force``.
    """
    from ..io.atomic_write import remove_left_over
    from ..io.checkpoint import INDEX, SINGLE
    from ..io.job_progress import NAME
    from ..io.replace_folder import real_folder

    if os.path.isdir(out_dir):
        remove_left_over(out_dir)
    there = sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
    whole = {INDEX, SINGLE} & {*there}
    if not there or (
        NAME in there and not (force and whole)
    ):  # the writer itself tells its own interrupted job from another's
        return out_dir
    if not force:
        some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise ValueError(f"{out_dir} is not empty ({some}); choose another folder, or pass --force")
    job(out_dir, dry_run=True)  # what cannot be done must not cost the work of a job that was interrupted
    real = os.path.realpath(out_dir)
    beside = os.path.join(real_folder(real), f".{os.path.basename(real)}.partial")
    names = set(os.listdir(beside)) if os.path.isdir(beside) else set()
    finished = names & {INDEX, SINGLE} and NAME not in names  # and never put in its place
    if names and (finished or not resume):
        shutil.rmtree(beside)
    return beside


def publish_output(folder: str, out_dir: str) -> None:
    """Put what was written in the place of OUT_DIR, in one step; nothing to do where it was written there."""
    from ..io.atomic_write import partial_path
    from ..io.replace_folder import publish_folder, real_folder

    if folder == out_dir:
        return
    real = os.path.realpath(out_dir)
    with partial_path(real_folder(real), os.path.basename(real)) as stage:
        new = os.path.join(stage, "new")
        os.rename(folder, new)
        publish_folder(new, real, stage)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
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
