"""Which tensor goes into which file, and what the files are called."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from .checkpoint import INDEX, SINGLE
from .state_dict import Item

MAX_SHARD_BYTES = 4 * 1000**3  # 4 GB: below the limits of FAT and of most uploaders
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")


def assign_shards(some: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
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


def shard_names(count: int, token: str = "", numbered: bool = False) -> list[str]:
    """File names of ``count`` shards. token: of 8 hexadecimal digits, so that names are none that are there already.
    numbered: a single one too, which an index names then."""
    if count == 1 and not numbered:
        return [SINGLE]
    stem = f"model-{token}" if token else "model"
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def shard_token() -> str:
    """For the names of the shards of one save."""
    return secrets.token_hex(4)


def is_ours(name: str) -> bool:
    """Whether a file name is one that :func:`shard_names` or the index would give."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None
