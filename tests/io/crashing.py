"""Writers that stop at any step: by a crash, after which nothing more reaches the disk, or by an error of the disk."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pennyweight.io import replace_checkpoint

# All that changes names on a disk, or waits for it
STEPS = ("replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir", "fsync", "open")


class Crash(BaseException):
    """The end of the process. What is done to clean up after it reaches no disk either."""


@contextmanager
def stopping(how: str, at: int = 1 << 30) -> Iterator[list[str]]:
    """Stop step number ``at``, from 0: "before" or "after" it by a crash, "error": by OSError, once. Gives the steps.

    Locks are let go of, as those of a dead process are.
    """
    taken: list[str] = []
    dead = False

    def step(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal dead
            if (name == "open" and not args[1] & os.O_CREAT) or (name == "mkdir" and os.path.isdir(args[0])):
                return function(*args, **kwargs)  # which changes nothing
            if dead:
                raise Crash
            taken.append(f"{name} {os.path.basename(str(args[0]))}")
            mine = len(taken) - 1 == at
            dead = mine and how != "error"
            if mine and how == "before":
                raise Crash
            if mine and how == "error":
                raise OSError(5, f"Input/output error: step {at}, {name}")
            out = function(*args, **kwargs)
            if mine:
                raise Crash
            return out

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, step(name, getattr(os, name)))
        patch.setattr(replace_checkpoint, "exchange_folders", step("exchange", replace_checkpoint.exchange_folders))
        yield taken


class FullDisk:
    """Wraps a file that is written to: the disk holds so many more bytes."""

    def __init__(self, file: Any, left: list[int]) -> None:
        self.file, self.left = file, left

    def write(self, data: Any) -> int:
        fits = min(len(data), self.left[0])
        self.left[0] -= fits
        if fits == 0 and len(data):
            raise OSError(28, "No space left on device")
        return self.file.write(data[:fits])

    def truncate(self, size: int) -> int:
        return self.file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.file.close()


@contextmanager
def full_after(count: int) -> Iterator[list[int]]:
    """A disk with room for ``count`` more bytes. Gives a list with what is left."""
    left, fdopen = [count], os.fdopen

    def wrapped(fd: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = fdopen(fd, mode, *args, **kwargs)
        return FullDisk(file, left) if mode == "r+b" else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", wrapped)
        yield left
