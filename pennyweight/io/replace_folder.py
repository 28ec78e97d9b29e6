"""Replaces a whole folder atomically: weights, configs and tokenizer in one step, whichever library writes them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .atomic_write import is_staging, make_folders, partial_path, sync_folder
from .checkpoint import INDEX, SINGLE, read_index
from .locks import folder_lock
from .replace_checkpoint import is_partial_name, put_checkpoint
from .safetensors_file import File
from .shard_plan import is_ours

_NO_EXCHANGE = {
    errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EMLINK
}  # fmt: skip
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h; RENAME_SWAP of macOS has the same number


@contextmanager
def replacing(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a new folder to write to; at the end it replaces ``folder`` in one step.

        with replacing("model") as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)

    For writers that are not atomic, and for files that belong together. A reader, also after a crash, finds either the
    old folder or the new one. An error keeps the old one. Other files of the old folder are kept, except the weights of
    its checkpoint.

    The atomic exchange needs Linux or macOS and a file system that supports it (ext4, XFS, Btrfs, tmpfs and APFS do).
    Otherwise (or if the folder is a mount point), files are renamed one by one, weights last: weights are always the
    old or the new ones, but a crash in between may leave a new config.json with old weights. Raises OSError if a write
    fails.
    """
    folder = os.path.realpath(os.fspath(folder))
    parent, name = os.path.split(folder)
    with make_folders(parent), partial_path(real_folder(folder), name) as stage:
        new = os.path.join(stage, name)
        os.mkdir(new)
        yield new
        publish_folder(new, folder, stage)


def real_folder(folder: str) -> str:
    """Parent of the staging folder for replacing ``folder`` (a real path): its parent, or ``folder`` itself if the
    parent is on another disk or not writable."""
    parent = os.path.dirname(folder)
    if os.path.isdir(folder):
        other = os.stat(folder).st_dev != os.stat(parent).st_dev
        return folder if other or not os.access(parent, os.W_OK) else parent
    return parent


def publish_folder(new: str, folder: str, stage: str) -> None:
    """Replace a folder with a finished one, see :func:`replacing`. The replaced contents end up in ``stage``, a folder
    on the same disk that the caller removes."""
    _sync_tree(new)
    if not os.path.isdir(folder):
        os.rename(new, folder)
        sync_folder(os.path.dirname(folder))
        return
    with folder_lock(folder) as alone:
        left = _weights if any(map(is_ours, os.listdir(new))) else _unfinished
        shutil.copystat(folder, new)
        if _take_along(folder, new, left):
            _sync_tree(new, files=False)
            if exchange_folders(new, folder):
                sync_folder(os.path.dirname(folder))
                _take_along(new, folder, left)  # files added to the old folder meanwhile
                return
        _move_each(new, folder, stage, alone)


def _unfinished(name: str) -> bool:
    return is_staging(name) or is_partial_name(name)


def _weights(name: str) -> bool:
    return is_ours(name) or _unfinished(name)


def exchange_folders(a: str, b: str) -> bool:
    """Exchange the names of two folders atomically. False if the system or the file system does not support it."""
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    if sys.platform.startswith("linux") and hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE)
    elif sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(os.fsencode(a), os.fsencode(b), _RENAME_EXCHANGE)
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), b)
    return not failed


def _take_along(old: str, new: str, left: Callable[[str], bool] = lambda name: False) -> bool:
    """Hard-link files of the old folder into the new one where missing, except names for which ``left`` is true.
    False if links are not supported."""
    for name in os.listdir(old):
        from_, to = os.path.join(old, name), os.path.join(new, name)
        if left(name):
            continue
        if os.path.isdir(from_) and not os.path.islink(from_):
            if not os.path.lexists(to):
                os.mkdir(to)
                shutil.copystat(from_, to)
            if not os.path.islink(to) and os.path.isdir(to) and not _take_along(from_, to):
                return False
        elif not os.path.lexists(to):
            try:
                os.link(from_, to, follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError as e:
                if e.errno in _NO_EXCHANGE:
                    return False
                raise
    return True


def _move_each(new: str, folder: str, stage: str, alone: bool) -> None:
    """Rename file by file: the weights last, and in one step."""
    names = sorted(os.listdir(new))
    for name in names:
        if is_ours(name):
            continue
        from_, to = os.path.join(new, name), os.path.join(folder, name)
        if os.path.isdir(from_) and not os.path.islink(from_):
            for at, _, files in os.walk(from_):
                there = os.path.join(to, os.path.relpath(at, from_))
                os.makedirs(there, exist_ok=True)
                for file in files:
                    os.replace(os.path.join(at, file), os.path.join(there, file))
                sync_folder(there)
        else:
            os.replace(from_, to)
    sync_folder(folder)
    if INDEX in names:
        weights = sorted(set(read_index(os.path.join(new, INDEX)).values()))
    else:
        weights = [SINGLE] if SINGLE in names else []
    if weights:
        holds, total = [], 0
        for name in weights:
            with File(os.path.join(new, name)) as file:
                holds.append(list(file.entries))
                total += sum(e.end - e.begin for e in file.entries.values())
        put_checkpoint(folder, stage, [os.path.join(new, name) for name in weights], holds, total, alone)


def _sync_tree(folder: str, files: bool = True) -> None:
    """Flush a folder to disk. files=False: only the folders."""
    for at, _, names in os.walk(folder, topdown=False):
        for name in names if files else ():
            path = os.path.join(at, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                fd = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        sync_folder(at)
