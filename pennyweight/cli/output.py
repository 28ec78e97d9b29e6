"""What commands print and where they write: errors, JSON, tables, reports, progress, output folders, and torchrun."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

import typer

from .interrupts import Terminated, unwinding

if TYPE_CHECKING:
    from ..planning.quantize_report import Report


# -- errors, on one line of stderr; exit codes -------------------------------------------------------------------------

FAILED = 2
LEAST_SHARD = 1000  # bytes
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT or SIGTERM, the shell convention
# Messages contain Python arguments; the command line shows the options instead
_OPTIONS = {
    "resume=False": "--no-resume", "skip=": "--skip ", "group_size=": "--group-size ",
    "on_indivisible=": "--on-indivisible ", "allow_pickle=True": "--allow-pickle", "gguf_type=": "--type ",
    "imatrix=": "--imatrix ", "to=": "--to ", "requantize=True": "--requantize", "for_=": "--for ",
    "group_size must": "--group-size must", "on_indivisible must": "--on-indivisible must",
    "pass calibration=batches (tensors, tuples, or mappings such as {'input_ids': ..., 'attention_mask': ...})":
        "pass text with --calibration",
}  # fmt: skip
_ARGUMENT = re.compile(rf"\b({'|'.join(map(re.escape, _OPTIONS))})")


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: expected errors (ValueError and subclasses, OSError) print one line, unless --traceback.

    Ctrl-C and SIGTERM unwind the command, print one line, and exit with 130 and 143. Any other exception is a bug of
    this package and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, traceback: bool = False, **kwargs: Any) -> None:
        try:
            with unwinding(term=world() == 1):  # torchrun stops its workers itself
                with collection_paused():
                    from .. import startup  # noqa: F401  (not before: --help needs no torch)

                command(*args, traceback=traceback, **kwargs)
        except KeyboardInterrupt as signal:
            if traceback:
                raise
            raise _stopped(signal) from None
        except BrokenPipeError:
            raise  # the reader closed the pipe; click exits quietly
        except (ValueError, OSError) as error:
            if traceback:
                raise
            typer.echo(f"pennyweight: {line(error)}", err=True)
            raise typer.Exit(FAILED) from None

    return run


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection while modules are imported: it finds nothing, and takes a sixth of the time of importing
    torch and transformers. If some were imported, what exists afterwards is not examined again."""
    was, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if was:
            gc.enable()


def _stopped(signal: KeyboardInterrupt, hint: str = "") -> typer.Exit:
    """Print that the command was stopped. Returns the exit."""
    terminated = isinstance(signal, Terminated)
    typer.echo(f"pennyweight: {'terminated' if terminated else 'interrupted'}{hint}", err=True)
    return typer.Exit(TERMINATED if terminated else INTERRUPTED)


def line(error: Exception) -> str:
    """The message of an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return " ".join(_ARGUMENT.sub(lambda found: _OPTIONS[found[1]], text).split())


# -- tables for terminals and pipes ------------------------------------------------------------------------------------

_UNBOUNDED = 10_000  # width for pipes: lines are not folded, so that grep finds names


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns in ``right`` are right-aligned. As wide as the terminal, or as the text if there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        out.add_row(*map(Text, row))  # Text: rich would parse "[64]" as markup
    terminal = sys.stdout.isatty()
    buffer = StringIO()
    Console(file=buffer, width=Console().width if terminal else _UNBOUNDED, force_terminal=terminal).print(out)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())


# -- output folder, progress bar, final report -------------------------------------------------------------------------


def show(data: Mapping[str, Any], text: Callable[[], str], json_path: str) -> None:
    """Print the text, or for ``--json -`` the data and nothing else; for ``--json FILE`` also write the data there."""
    if json_path:
        encoded = json.dumps(_plain(data), indent=2, allow_nan=False)
        if json_path == "-":
            typer.echo(encoded)
            return
        from ..io.atomic_write import write_bytes

        write_bytes(json_path, f"{encoded}\n".encode())
    typer.echo(text())


def _plain(data: Any) -> Any:
    """The data with "inf", "-inf" and "nan" for numbers that JSON does not have."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def print_report(report: Report, before: int, after: int | None, json_path: str) -> None:
    """Print the report and the files' true sizes; write JSON to ``json_path`` if given. after None: a dry run."""
    data = {**report.to_dict(), "dry_run": after is None, "files": {"before": before, "after": after}}
    show(data, lambda: f"{report}\n{file_sizes(report, before, after)}", json_path)


@contextmanager
def resume_hint() -> Iterator[None]:
    """Around a run that the same command resumes: says so if it is interrupted."""
    try:
        yield
    except KeyboardInterrupt as signal:
        raise _stopped(signal, "; run the same command again to resume") from None


def file_sizes(report: Report, before: int, after: int | None) -> str:
    """One line with the files' true sizes; for a dry run an estimate."""
    from ..planning.quantize_report import size

    text = f"files: {before:,} bytes ({size(before)})"
    if after is None:
        return f"{text} -> about {report.bytes_after:,} bytes ({size(report.bytes_after)}); a dry run, nothing written"
    ratio = f"{before / after:.2f}x smaller" if after <= before else f"{after / before:.2f}x larger"
    return f"{text} -> {after:,} bytes ({size(after)}), {ratio}"


def shard_bytes(size: str) -> int:
    """The bytes of --max-shard-size. Raises ValueError also for a number whose unit was forgotten."""
    from ..planning.quantize_report import nbytes_of

    found = nbytes_of(size)
    if found < LEAST_SHARD:
        raise ValueError(f"--max-shard-size {size} is {found} bytes; write a unit, as in 5GB")
    return found


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
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """The bar of a command on stderr, see support/progress.py. Yields a function to pass as ``progress``."""
    from ..support.progress import step

    with step("", delay=0.5) as advance:
        yield advance


# -- torchrun, several processes of which rank 0 prints ----------------------------------------------------------------


def world() -> int:
    """Number of processes started by torchrun; 1 without it."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    except ValueError:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']!r} is not a number; start with torchrun") from None


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints."""
    return world() == 1 or os.environ["RANK"] == "0"


@contextmanager
def over_ranks() -> Iterator[None]:
    """The process group of all torchrun processes; does nothing without torchrun."""
    if world() == 1:
        yield
        return
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise ValueError("this torch has no gloo backend, which several processes need; start without torchrun")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
