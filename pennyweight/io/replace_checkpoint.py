"""Replaces a checkpoint with a finished one atomically for readers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

from .atomic_write import index_bytes, sync_folder, write_file
from .checkpoint import INDEX, SINGLE, read_index
from .errors import CheckpointError
from .job_progress import NAME
from .locks import folder_lock
from .shard_plan import is_ours, shard_names, shard_token


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
    named = _named(folder)
    names = shard_names(len(files), "" if alone and not there else shard_token(), SINGLE in named)
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


def is_partial_name(name: str) -> bool:
    """Whether a name is that of an unfinished file of a resumable job."""
    return name == NAME or (name.endswith(".partial") and is_ours(name.removesuffix(".partial")))


def _remove(folder: str, names: Iterable[str]) -> None:
    """Best-effort cleanup after an error."""
    for name in names:
        with suppress(OSError):
            os.unlink(os.path.join(folder, name))


def _named(folder: str) -> set[str]:
    """Shards named by the index in a folder; empty if there is no readable index."""
    try:
        return set(read_index(os.path.join(folder, INDEX)).values())
    except CheckpointError:
        return set()
