"""Helpers of the disk-to-disk commands: output folder, progress bar, final report."""

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
    from ..planning.report import Report

INTERRUPTED = 130  # 128 + SIGINT, the shell convention


def print_report(report: Report, before: int, after: int | None, report_path: str) -> None:
    """Print the report and the files' true sizes; write JSON to ``report_path`` if given. after None: a dry run."""
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
    """On Ctrl-C print how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("pennyweight: interrupted; run the same command again to resume", err=True)
        raise typer.Exit(INTERRUPTED) from None


def file_sizes(report: Report, before: int, after: int | None) -> str:
    """One line with the files' true sizes; for a dry run an estimate."""
    from ..planning.report import size

    text = f"files: {before:,} bytes ({size(before)})"
    if after is None:
        return f"{text} -> about {report.bytes_after:,} bytes ({size(report.bytes_after)}); a dry run, nothing written"
    ratio = f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
    return f"{text} -> {after:,} bytes ({size(after)}), {ratio}"


def check_report_path(path: str, out_dir: str | None) -> None:
    """Raise before the work starts, not after an hour. A report in a new OUT_DIR is allowed."""
    if path in ("", "-"):
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not (os.path.isdir(folder) or (out_dir and folder == os.path.abspath(out_dir))):
        why = "is a folder" if os.path.isdir(path) else f"folder {folder} does not exist"
        raise ValueError(f"--json {path}: {why}")


def output_folder(out_dir: str, force: bool, job: Callable[..., Report], resume: bool = True) -> str:
    """The folder that a run writes to: OUT_DIR, or one next to it if it has files to replace. ``resume`` keeps the
    files of an interrupted run there.

    Raises ValueError if OUT_DIR has files that this command did not write, unless ``force``.
    """
    from ..io.atomic_write import remove_left_over
    from ..io.checkpoint import INDEX, SINGLE
    from ..io.replace_checkpoint import PROGRESS, real_folder

    if os.path.isdir(out_dir):
        remove_left_over(out_dir)
    there = sorted(os.listdir(out_dir)) if os.path.isdir(out_dir) else []
    whole = {INDEX, SINGLE} & {*there}
    if not there or (
        PROGRESS in there and not (force and whole)
    ):  # the writer checks whether the interrupted run was of the same command
        return out_dir
    if not force:
        some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise ValueError(f"{out_dir} is not empty ({some}); choose another folder, or pass --force")
    job(out_dir, dry_run=True)  # fail before the files of an interrupted run are removed
    real = os.path.realpath(out_dir)
    beside = os.path.join(real_folder(real), f".{os.path.basename(real)}.partial")
    names = set(os.listdir(beside)) if os.path.isdir(beside) else set()
    finished = names & {INDEX, SINGLE} and PROGRESS not in names  # complete, but never renamed to OUT_DIR
    if names and (finished or not resume):
        shutil.rmtree(beside)
    return beside


def publish_output(folder: str, out_dir: str) -> None:
    """Replace OUT_DIR by the written folder atomically; does nothing if they are the same."""
    from ..io.atomic_write import partial_path
    from ..io.replace_checkpoint import publish_folder, real_folder

    if folder == out_dir:
        return
    real = os.path.realpath(out_dir)
    with partial_path(real_folder(real), os.path.basename(real)) as stage:
        new = os.path.join(stage, "new")
        os.rename(folder, new)
        publish_folder(new, real, stage)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A progress bar on stderr if that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
