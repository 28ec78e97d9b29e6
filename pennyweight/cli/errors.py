"""Reports expected errors as one line on stderr with exit code 2."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

Traceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")]
FAILED = 2
# Messages contain Python arguments; the command line shows the options instead
_OPTIONS = {
    "resume=False": "--no-resume", "skip=": "--skip ", "group_size=": "--group-size ",
    "on_indivisible=": "--on-indivisible ", "allow_pickle=True": "--allow-pickle", "gguf_type=": "--type ",
    "to=": "--to ",
}  # fmt: skip
_ARGUMENT = re.compile(rf"\b({'|'.join(_OPTIONS)})")


def report_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: expected errors (ValueError and subclasses, OSError) print one line, unless --traceback.

    Any other exception is a bug of this package and keeps its traceback.
    """

    @functools.wraps(command)
    def run(*args: Any, traceback: bool = False, **kwargs: Any) -> None:
        try:
            command(*args, traceback=traceback, **kwargs)
        except BrokenPipeError:
            raise  # the reader closed the pipe; click exits quietly
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
    return _ARGUMENT.sub(lambda found: _OPTIONS[found[1]], " ".join(text.split()))
