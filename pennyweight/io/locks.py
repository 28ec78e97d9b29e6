"""Locks of files and folders that end with their holder, however it ends: no file is left behind by one that died.

The lock is flock's, on the open file or folder itself. Windows has none, nor have some network file systems; callers
are told so, and then remove nothing that might be another writer's.
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

PATIENCE = 300.0  # seconds; a folder is locked for some renames, or for a whole job
_POLL = 0.02
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF, errno.EINVAL}


def try_lock(fd: int) -> bool | None:
    """Lock an open file or folder. False: another holds it. None: there are no locks here."""
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
    """Unlock. Closing alone would not, where a process that was forked meanwhile has the file open too."""
    if fcntl is not None:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def same_inode(fd: int, path: str) -> bool:
    """Whether a path still leads to the file or folder that was opened."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def open_folder(folder: str) -> int | None:
    """A descriptor of a folder, to be locked; None where the system has none for folders."""
    if os.name != "posix":
        return None
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def folder_lock(folder: str, patience: float = PATIENCE) -> Iterator[bool]:
    """Within: no other process or thread is in such a section for this folder. False: there are no locks here.

    Raises CheckpointError where another has held it for ``patience`` seconds.
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
