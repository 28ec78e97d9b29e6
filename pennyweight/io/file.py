"""A file of some format, open for reading: a regular file and no other, read by plain reads or mapped.

Every read that fails is a CheckpointError; nothing is allocated but for what is asked for.
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

from .errors import CheckpointError

_PIECE = 8 << 20  # bytes of a read that copies


class RawFile:
    """An open file. A subclass reads its header in ``_read_header``, which may raise CheckpointError, and only that.

    Threads may read at once: each read names its offset. The file is closed by :meth:`close`, or with the last
    reference to it: a checkpoint may be a model's offloaded weights, which nobody closes.

    mmap: whether tensors are mapped; else they are read into memory of their own. A process that touches a mapped file
    after another has cut it short gets SIGBUS; one that is replaced by a rename stays whole for those who mapped it.
    """

    def __init__(self, path: str, mmap: bool = True) -> None:
        self.path, self.mmap = path, mmap
        self._map: Map | None = None
        self._turn = threading.Lock()  # of seek and read, where the system has no read at an offset
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
        """Close the file. Tensors that were mapped stay valid."""
        self._close()
        self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _read_into(self, offset: int, view: memoryview) -> int:
        """Number of bytes read from offset on, at most those of the view; 0 at the end."""
        if not self._close.alive:  # the number of the descriptor may be another file's by now
            raise CheckpointError(self.path, None, "is closed")
        try:
            if hasattr(os, "preadv"):
                return os.preadv(self._fd, [view], offset)
            with self._turn:
                os.lseek(self._fd, offset, os.SEEK_SET)
                data = os.read(self._fd, min(len(view), _PIECE))
        except OSError as e:
            raise CheckpointError(self.path, None, f"cannot be read: {e.strerror}") from e
        view[: len(data)] = data
        return len(data)

    def _read_at(self, offset: int, count: int) -> bytes:
        """count bytes from offset on."""
        data = bytearray(count)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def _fill(self, offset: int, view: memoryview) -> None:
        """Read from offset on, until the buffer is full."""
        while len(view):
            count = self._read_into(offset, view)
            if not count:
                raise CheckpointError(self.path, None, "ends early: it shrank while it was read")
            view, offset = view[count:], offset + count

    def _mapped(self, begin: int, end: int) -> Tensor:
        """uint8 bytes [begin, end) of the mapped file, not none of them; copy-on-write: the file stays as it is.
        Of a file that is not to be mapped, a copy."""
        if not self.mmap:
            out = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            self._fill(begin, memoryview(out.numpy()))
            return out
        if self._map is None:
            if not self._close.alive:
                raise CheckpointError(self.path, None, "is closed")
            try:
                self._map = Map(self._fd, self.size, access=ACCESS_COPY)
            except (OSError, ValueError) as e:
                raise CheckpointError(self.path, None, f"cannot be mapped: {e}") from e
        return torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=begin)
