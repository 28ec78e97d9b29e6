"""Which tensor goes into which file, and what the files are called."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from .checkpoint import INDEX, SINGLE
from .native import Item

MAX_SHARD_BYTES = 4 * 1000**3  # 4 GB: below the limits of FAT and of most uploaders


def divide(some: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Items in order, filled into shards; a tensor larger than a shard gets one of its own, never two."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    shards: list[list[Item]] = [[]]
    room = max_shard_bytes
    for item in some:
        if item.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room -= item.nbytes
    return shards


def shard_names(count: int) -> list[str]:
    """File names of ``count`` shards."""
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def is_ours(name: str) -> bool:
    """Whether a file name is one that :func:`shard_names` or the index would give."""
    if name in (SINGLE, INDEX):
        return True
    number, of, count = name.removeprefix("model-").removesuffix(".safetensors").partition("-of-")
    digits = number.isdecimal() and count.isdecimal() and len(number) == len(count) == 5
    return bool(of) and digits and name == f"model-{number}-of-{count}.safetensors"


def remove_stale(folder: str, keep: Sequence[str]) -> None:
    """Remove files of an earlier checkpoint in the folder, which a reader might otherwise take for part of this."""
    for name in os.listdir(folder):
        if is_ours(name) and name not in keep:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
