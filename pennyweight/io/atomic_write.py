"""Files and folders that appear complete or not at all; locks between the processes that write them."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from .file import CheckpointError

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


_STAGING = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")
_MAX_NAME = 200  # bytes; a file name has 255 at most


def open_new(path: str) -> Any:
    """Open a new unbuffered file. Fails if the path exists, even as a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666), "r+b", buffering=0)


@contextmanager
def partial_path(folder: str, name: str) -> Iterator[str]:
    """A new folder inside ``folder`` for unfinished files; its remaining contents are removed on exit.

    First removes staging folders of the same name that dead writers left behind. A live writer holds the lock of its
    staging folder, so its files stay.
    """
    name = os.fsdecode(os.fsencode(name)[:_MAX_NAME])
    remove_left_over(folder, name)
    while True:
        path = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.partial")
        os.mkdir(path)
        try:
            fd = open_folder(path)
        except FileNotFoundError:  # another writer removed it as a leftover before it was locked
            continue
        if fd is None or (try_lock(fd) is not False and same_inode(fd, path)):
            break
        os.close(fd)
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            if fd is not None:
                unlock(fd)
                os.close(fd)


def remove_left_over(folder: str, name: str | None = None) -> None:
    """Remove staging folders of dead writers: those for ``name``, or all. Without file locks, dead and live writers
    cannot be distinguished, and all staging folders stay."""
    for found in os.listdir(folder):
        match = _STAGING.fullmatch(found)
        if match is None or name not in (None, match[1]):
            continue
        path = os.path.join(folder, found)
        try:
            fd = None if os.path.islink(path) else open_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if fd is None:
            continue
        try:
            if try_lock(fd) and same_inode(fd, path):
                shutil.rmtree(path)
        finally:
            unlock(fd)
            os.close(fd)


def is_staging(name: str) -> bool:
    """Whether a folder name is one that :func:`partial_path` generates."""
    return _STAGING.fullmatch(name) is not None


def rename_into_place(temp: str, final: str) -> None:
    """Move a finished file to its final path atomically. An existing file or link there is replaced, not followed."""
    os.replace(temp, final)
    sync_folder(os.path.dirname(final))


def sync_folder(folder: str) -> None:
    """Flush renames in a folder to disk. Windows has no such call."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def make_folders(folder: str) -> Iterator[None]:
    """Make sure the folder exists inside the context. On an error, folders created here are removed if still empty."""
    new = []
    at = folder
    while not os.path.isdir(at):
        new.append(at)
        at = os.path.dirname(at)
    if new:
        os.makedirs(folder, exist_ok=True)
    for path in new:
        sync_folder(os.path.dirname(path))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in new:
                os.rmdir(path)
        raise


def check_room(folder: str, need: int) -> None:
    """Raise OSError if the disk has less than this many free bytes."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{folder}: {need} bytes are required, {free} are free")


@contextmanager
def says_what_was_needed(path: str, need: int) -> Iterator[None]:
    """An error because the disk is full, from a write that knows neither path nor size, gets both.

    Not checked before: some network file systems say that no byte is free.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        at = path
        while not os.path.isdir(at):
            at = os.path.dirname(at)
        free = shutil.disk_usage(at).free
        text = f"{os.strerror(error.errno)}: {path}: {need} bytes are required, {free} are free"
        raise OSError(error.errno, text) from error


_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def write_all(file: Any, data: bytes | memoryview, offset: int = 0) -> None:
    """Write all of a buffer into an unbuffered file, starting at the offset."""
    file.seek(offset)
    view = memoryview(data)
    while view:  # on a nearly full disk a write may be short; the next write then raises the error
        view = view[file.write(view) :]


def write_file(path: str, data: bytes) -> None:
    """Write a new file; it is on disk on return."""
    with open_new(path) as f:
        write_all(f, data)
        os.fsync(f.fileno())


def check_complete(path: str, left: Mapping[str, int]) -> None:
    """Raise CheckpointError if a tensor, with the elements or rows left to write, was not written, or only in part."""
    names = [name for name, count in left.items() if count]
    if names:
        raise CheckpointError(path, names[0], f"was not written completely, nor were {len(names) - 1} others")


def write_bytes(path: str, data: bytes) -> None:
    """Write a small file atomically."""
    folder, name = os.path.split(os.path.abspath(path))
    with partial_path(folder, name) as stage:
        temp = os.path.join(stage, name)
        write_file(temp, data)
        rename_into_place(temp, os.path.join(folder, name))
