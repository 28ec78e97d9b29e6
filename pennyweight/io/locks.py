"""File and folder locks that are released when their holder exits or dies; no lock file is left behind.

Uses flock on the open file or folder itself. Windows and some network file systems do not support it; callers are
notified, and then remove nothing that another writer may own.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PATIENCE = 300.0  # seconds; a folder is locked during a few renames, or during a whole job
_POLL = 0.02
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL}


def try_lock(fd: int) -> bool | None:
    """Lock an open file or folder. False: another process holds it. None: locks are not supported here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno in _NO_LOCKS:
            return None
        raise
    return True


def unlock(fd: int) -> None:
    """Unlock explicitly: closing is not enough if a process forked meanwhile also has the file open."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def same_inode(fd: int, path: str) -> bool:
    """Whether a path still refers to the opened file or folder."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def open_folder(folder: str) -> int | None:
    """A descriptor of a folder, for locking; None if the system cannot open folders."""
    if os.name != "posix":
        return None
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def folder_lock(folder: str, patience: float = PATIENCE) -> Iterator[bool]:
    """Hold the exclusive lock of this folder, across processes and threads. Yields False if locks are not supported.

    Raises CheckpointError if another process holds it for ``patience`` seconds.
    """
    folder = os.path.realpath(folder)
    end = time.monotonic() + patience
    while True:
        fd = open_folder(folder)
        if fd is None:
            yield False
            return
        try:
            got = try_lock(fd)
            if got is None or (got and same_inode(fd, folder)):
                yield bool(got)
                return
        finally:
            unlock(fd)
            os.close(fd)
        if time.monotonic() >= end:
            raise CheckpointError(
                folder, None, "another process is writing there; wait until it is done, or choose another folder"
            )
        time.sleep(_POLL)
