"""Replaces a checkpoint, or a whole folder, atomically for readers; names of the files of a checkpoint."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from .atomic_write import folder_lock, is_staging, make_folders, partial_path, sync_folder, write_file
from .checkpoint import INDEX, PROGRESS_ENDING, SINGLE, index_bytes, read_index
from .file import CheckpointError
from .safetensors_file import File

_SHARD = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")
PROGRESS = f"quantize{PROGRESS_ENDING}"
_NO_EXCHANGE = {
    errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EBUSY, errno.EPERM, errno.EMLINK
}  # fmt: skip
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h; RENAME_SWAP of macOS has the same number


def shard_names(count: int, token: str = "", numbered: bool = False) -> list[str]:
    """File names of ``count`` shards. token: 8 hexadecimal digits that make the names unique in the folder.
    numbered: also number a single file, which an index then names."""
    if count == 1 and not numbered:
        return [SINGLE]
    stem = f"model-{token}" if token else "model"
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def is_ours(name: str) -> bool:
    """Whether a file name is one that :func:`shard_names` or the index uses."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def is_partial_name(name: str) -> bool:
    """Whether a name is that of an unfinished file of a resumable job."""
    return name == PROGRESS or (name.endswith(".partial") and is_ours(name.removesuffix(".partial")))


def replace_checkpoint(
    folder: str, stage: str, files: Sequence[str], holds: Sequence[Iterable[str]], total: int
) -> None:
    """Put finished files into a folder as its checkpoint; docs/format.md describes the order of the steps.

    stage   a folder on the same disk for the index, until it is renamed into place
    files   paths of the finished safetensors files, on the same disk; they are renamed
    holds   names of the tensors stored in each
    total   total bytes of all tensors

    Shards get names that no file in the folder has, so that the old ones stay until the new index is on disk. Leftovers
    of an older checkpoint or a dead writer are removed last. An error before the atomic step keeps the old checkpoint.
    """
    with folder_lock(folder) as alone:
        put_checkpoint(folder, stage, files, holds, total, alone)


def put_checkpoint(
    folder: str, stage: str, files: Sequence[str], holds: Sequence[Iterable[str]], total: int, alone: bool
) -> None:
    """:func:`replace_checkpoint` in a locked folder. alone: whether the folder could be locked."""
    found = os.listdir(folder)
    there = {name for name in found if is_ours(name)}
    try:
        named = set(read_index(os.path.join(folder, INDEX)).values())
    except CheckpointError:  # there is no readable index
        named = set()
    names = shard_names(len(files), "" if alone and not there else secrets.token_hex(4), SINGLE in named)
    shards = dict(zip(files, names, strict=True)) if names != [SINGLE] else {}
    head, other = (INDEX, SINGLE) if shards else (SINGLE, INDEX)
    temp = os.path.join(stage, INDEX) if shards else files[0]
    # Without locks, files that no index names may belong to another writer that is about to write its index
    stale = (there if alone else there & named) - {head, other}
    if alone:  # no other job is running: it would hold the lock
        stale |= {name for name in found if is_partial_name(name)}
    if shards:
        weight_map = {s: name for name, stored in zip(names, holds, strict=True) for s in stored}
        write_file(temp, index_bytes(weight_map, total))
    try:
        for file, name in shards.items():
            os.replace(file, os.path.join(folder, name))
        if shards:
            sync_folder(folder)
        os.replace(temp, os.path.join(folder, head))
    except BaseException:
        if os.path.lexists(temp):
            _remove(folder, [name for file, name in shards.items() if not os.path.lexists(file)])
        raise
    sync_folder(folder)
    if other in there:
        try:
            os.unlink(os.path.join(folder, other))
        except OSError:
            if other == INDEX and head not in there:  # the old index is valid until it is replaced
                _remove(folder, [head])
            raise
        sync_folder(folder)
    for name in sorted(stale):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    if stale:
        sync_folder(folder)


def _remove(folder: str, names: Iterable[str]) -> None:
    """Best-effort cleanup after an error."""
    for name in names:
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))


# -- folders: weights, configs and tokenizer in one step, whichever library writes them --------------------------------


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
        has_weights = any(map(is_ours, os.listdir(new)))

        def left(name: str) -> bool:
            return is_staging(name) or is_partial_name(name) or (has_weights and is_ours(name))

        shutil.copystat(folder, new)
        if _take_along(folder, new, left):
            _sync_tree(new, files=False)
            if exchange_folders(new, folder):
                sync_folder(os.path.dirname(folder))
                _take_along(new, folder, left)  # files added to the old folder meanwhile
                return
        _move_each(new, folder, stage, alone)


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
