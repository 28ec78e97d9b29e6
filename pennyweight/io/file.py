"""Base class for reading a file of any format: regular files only, with plain reads or memory-mapped.

Every failed read raises CheckpointError. Memory is allocated only for the requested data.
"""

from __future__ import annotations

import os
import stat
from mmap import ACCESS_COPY
from mmap import mmap as Map
from typing import Any, Self

import torch
from torch import Tensor

from .errors import CheckpointError


class RawFile:
    """An open file. A subclass parses its header in ``_read_header``, which may raise only CheckpointError.

    mmap: whether tensors are memory-mapped; otherwise each is read into its own memory. Accessing a mapped file after
    another process truncated it raises SIGBUS. A file replaced by a rename stays intact for processes that mapped it.
    """

    def __init__(self, path: str, mmap: bool = True) -> None:
        self.path, self.mmap = path, mmap
        self._map: Map | None = None
        try:
            # a pipe must not block the open, and a link swapped in after the path was checked must not be followed
            flags = (
                os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
            )
            self._file = os.fdopen(os.open(path, flags | getattr(os, "O_NOFOLLOW", 0)), "rb", buffering=0)
        except (OSError, ValueError) as e:
            raise CheckpointError(path, None, f"cannot be opened: {getattr(e, 'strerror', None) or e}") from e
        try:
            info = os.fstat(self._file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(path, None, "is not a regular file")
            self.size = info.st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Mapped tensors stay valid."""
        self._file.close()
        self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _read_at(self, offset: int, count: int) -> bytes:
        """count bytes starting at offset."""
        try:
            self._file.seek(offset)
            data = self._file.read(count)
        except OSError as e:
            raise CheckpointError(self.path, None, f"cannot be read: {e.strerror}") from e
        if len(data) == count:
            return data
        buffer = bytearray(count)  # an interrupted read
        self._fill(offset, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, offset: int, view: memoryview) -> None:
        """Read from offset until the buffer is full."""
        try:
            self._file.seek(offset)
            while len(view):
                count = self._file.readinto(view)
                if not count:
                    raise CheckpointError(self.path, None, "ends early: the file was truncated while it was read")
                view = view[count:]
        except OSError as e:
            raise CheckpointError(self.path, None, f"cannot be read: {e.strerror}") from e

    def _mapped(self, begin: int, end: int) -> Tensor:
        """uint8 bytes [begin, end), not empty, of the mapped file, copy-on-write: the file does not change.
        With mmap=False, a copy."""
        if not self.mmap:
            out = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            self._fill(begin, memoryview(out.numpy()))
            return out
        if self._map is None:
            try:
                self._map = Map(self._file.fileno(), self.size, access=ACCESS_COPY)
            except (OSError, ValueError) as e:
                raise CheckpointError(self.path, None, f"cannot be mapped: {e}") from e
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=begin)
