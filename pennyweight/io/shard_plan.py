"""Assigns tensors to shards, and names the shard files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from .checkpoint import INDEX, SINGLE
from .state_dict import Item

MAX_SHARD_BYTES = 4 * 1000**3  # 4 GB: below the limits of FAT and most upload tools
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-[0-9]{5}-of-[0-9]{5}\.safetensors")


def assign_shards(some: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Distribute items over shards, in order; a tensor larger than a shard gets its own, and is never split."""
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
    """File names of ``count`` shards. token: 8 hexadecimal digits that make the names unique in the folder.
    numbered: also number a single file, which an index then names."""
    if count == 1 and not numbered:
        return [SINGLE]
    stem = f"model-{token}" if token else "model"
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def shard_token() -> str:
    """A token for the shard names of one save."""
    return secrets.token_hex(4)


def is_ours(name: str) -> bool:
    """Whether a file name is one that :func:`shard_names` or the index uses."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None
