"""What went wrong, as one line on stderr and exit code 2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")]
FAILED = 2
# Messages name arguments of Python; here they are options
_SPELLING = {
    "resume=False": "--no-resume", "skip=": "--skip ", "group_size=": "--group-size ",
    "on_indivisible=": "--on-indivisible ", "allow_pickle=True": "--allow-pickle", "gguf_type=": "--type ",
    "to=": "--to ",
}  # fmt: skip
_ARGUMENT = re.compile(rf"\b({'|'.join(_SPELLING)})")


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose expected errors (ValueError and its kind, OSError) end in one line; with --traceback they pass.

    Anything else is a defect of this package and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, traceback: bool = False, **kwargs: Any) -> None:
        try:
            command(*args, traceback=traceback, **kwargs)
        except BrokenPipeError:
            raise  # the reader of a pipe went away; click ends quietly
        except (ValueError, OSError) as error:
            if traceback:
                raise
            typer.echo(f"pennyweight: {line(error)}", err=True)
            raise typer.Exit(FAILED) from None

    return run


def line(error: Exception) -> str:
    """The message of an error on one line."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    return _ARGUMENT.sub(lambda found: _SPELLING[found[1]], " ".join(text.split()))
