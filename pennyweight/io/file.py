"""Errors of the readers and writers, and the base class for reading a file of any format.

Regular files only, with plain reads or memory-mapped. Every failed read raises CheckpointError. Memory is allocated
only for the requested data.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from mmap import ACCESS_COPY
from mmap import mmap as Map
from typing import Any, Self

import torch
from torch import Tensor

from ..support.arguments import close_names, hint
from ..support.errors import CheckpointError

__all__ = ["CheckpointError", "KeyedError", "RawFile", "checkpoint_errors", "no_such_path", "similar_path"]


def no_such_path(path: str) -> str:
    """What to do about a path that does not exist: a similar name next to it, or how to read a Hub repository."""
    if close := similar_path(path):
        return hint([close])
    folder = os.path.dirname(path)
    if path.count("/") == 1 and folder not in ("", ".", "..", "~") and not os.path.isdir(folder):
        return f"; a repository of the Hugging Face Hub is downloaded by pennyweight.io.local_path({path!r})"
    return f"; the current folder is {os.getcwd()}" if not os.path.isabs(path) else ""


def similar_path(path: str) -> str:
    """The path of a file or folder with a similar name, in the parent folder or in the current one; "" if none is."""
    parent, name = os.path.split(path)
    for folder in (parent, ""):
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        if close := close_names(name, names, 1, 0.75):
            return os.path.join(folder or ".", close[0])
    return ""


class KeyedError(ValueError):
    """A ValueError with the name of the tensor it is about."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


_PIECE = 8 << 20  # bytes of a read that copies


class checkpoint_errors:
    """Context in which a ValueError becomes a CheckpointError of this file and tensor; a KeyedError names its own.

    A CheckpointError without a path gets this one. prefix: goes before the reason.
    """

    __slots__ = ("path", "prefix", "tensor")

    def __init__(self, path: str | os.PathLike[str] | None, tensor: str | None = None, prefix: str = "") -> None:
        self.path, self.tensor, self.prefix = path, tensor, prefix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CheckpointError):
            if error.path is None and self.path is not None:
                raise CheckpointError(self.path, error.tensor, error.reason) from error
        elif isinstance(error, ValueError):
            tensor = error.name if isinstance(error, KeyedError) else self.tensor
            reason = str(error).removeprefix(f"{tensor}: ")
            raise CheckpointError(self.path, tensor, self.prefix + reason) from error


class RawFile:
    """An open file. A subclass parses its header in ``_read_header``, which may raise only CheckpointError.

    Threads may read at the same time: each read has its own offset. The file is closed by :meth:`close`, or with the
    last reference to it: offloaded weights of a model keep a checkpoint open, and nothing closes it.

    mmap: whether tensors are memory-mapped; otherwise each is read into its own memory. Accessing a mapped file after
    another process truncated it raises SIGBUS. A file replaced by a rename stays intact for processes that mapped it.
    """

    def __init__(self, path: str, mmap: bool = True) -> None:
        self.path, self.mmap = path, mmap
        self._map: Map | None = None
        self._seek_lock = threading.Lock()  # for systems without a read at an offset
        try:
            # a pipe must not block the open, and a link swapped in after the path was checked must not be followed
            flags = (
                os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
            )
            self._fd = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
        except (OSError, ValueError) as e:
            raise CheckpointError(path, None, f"cannot be opened: {getattr(e, 'strerror', None) or e}") from e
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            info = os.fstat(self._fd)
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(path, None, "is not a regular file")
            self.size = info.st_size
            self._read_header()
        except BaseException:
            self._close()
            raise

    def _read_header(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Mapped tensors stay valid."""
        self._close()
        self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _read_into(self, offset: int, view: memoryview) -> int:
        """Number of bytes read starting at offset, at most the size of the view; 0 at the end of the file."""
        self._check_open()
        try:
            if hasattr(os, "preadv"):
                count = os.preadv(self._fd, [view], offset)
            else:
                with self._seek_lock:
                    os.lseek(self._fd, offset, os.SEEK_SET)
                    data = os.read(self._fd, min(len(view), _PIECE))
                view[: len(data)] = data
                count = len(data)
        except OSError as e:
            self._check_open()
            raise CheckpointError(self.path, None, f"cannot be read: {e.strerror}") from e
        self._check_open()
        return count

    def _check_open(self) -> None:
        """Called before and after each use of the descriptor: once the file is closed, by this thread or another, its
        number may belong to another file, whose bytes must not be returned."""
        if not self._close.alive:
            raise CheckpointError(self.path, None, "is closed")

    def _read_at(self, offset: int, count: int) -> bytes:
        """count bytes starting at offset."""
        data = bytearray(count)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def _fill(self, offset: int, view: memoryview) -> None:
        """Read from offset until the buffer is full."""
        while len(view):
            count = self._read_into(offset, view)
            if not count:
                raise CheckpointError(self.path, None, "ends early: the file was truncated while it was read")
            view, offset = view[count:], offset + count

    def _mapped(self, begin: int, end: int) -> Tensor:
        """uint8 bytes [begin, end), not empty, of the mapped file, copy-on-write: the file does not change.
        With mmap=False, a copy."""
        if not self.mmap:
            out = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            self._fill(begin, memoryview(out.numpy()))
            return out
        mapped = self._map  # read once: close() in another thread clears it
        if mapped is None:
            self._check_open()
            try:
                mapped = Map(self._fd, self.size, access=ACCESS_COPY)
            except (OSError, ValueError) as e:
                self._check_open()
                raise CheckpointError(self.path, None, f"cannot be mapped: {e}") from e
            self._check_open()
            self._map = mapped
        return torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)
