"""Reads tokenizer files as data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import resolve_inside
from ..errors import CheckpointError
from ..strict_json import parse

# Gemma's tokenizer.json takes 33 MB
LIMITS = {"tokenizer.json": 128 << 20}
MAX_SMALL = 8 << 20


@dataclass
class Source:
    """Validated contents of the tokenizer files."""

    tokenizer: dict[str, Any]
    settings: dict[str, Any]  # tokenizer_config.json
    special: dict[str, Any]  # special_tokens_map.json
    config: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_source(folder: str) -> Source:
    """The files of a folder (a real path). Raises CheckpointError for an invalid or missing tokenizer.json."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(path):
        raise CheckpointError(
            path, None, "is missing; load the tokenizer with transformers and call save_pretrained(), which writes it"
        )
    return Source(
        _object(folder, "tokenizer.json"),
        _object(folder, "tokenizer_config.json"),
        _object(folder, "special_tokens_map.json"),
        _object(folder, "config.json"),
    )


def read_bytes(path: str, limit: int) -> bytes:
    """A whole file. Raises CheckpointError if it is larger than the limit or cannot be read."""
    try:
        with open(path, "rb") as f:
            data = f.read(limit + 1)
    except OSError as e:
        raise CheckpointError(path, None, f"cannot be read: {e.strerror}") from e
    if len(data) > limit:
        raise CheckpointError(path, None, f"is larger than {limit} bytes")
    return data


def _object(folder: str, name: str) -> dict[str, Any]:
    if not os.path.lexists(os.path.join(folder, name)):
        return {}
    path = resolve_inside(folder, name)
    limit = LIMITS.get(name, MAX_SMALL)
    try:
        data = parse(read_bytes(path, limit), max_bytes=limit, max_depth=32, floats=True, max_digits=40)
    except CheckpointError:
        raise
    except ValueError as e:
        raise CheckpointError(path, None, str(e)) from e
    if not isinstance(data, dict):
        raise CheckpointError(path, None, "must hold an object")
    return data


def find(node: Any, kind: str) -> dict[str, Any] | None:
    """The component of a given type in tokenizer.json, this node or a nested one."""
    if not isinstance(node, dict):
        return None
    if node.get("type") == kind:
        return node
    for key in ("pretokenizers", "normalizers", "decoders", "processors"):
        for inner in node.get(key) or () if isinstance(node.get(key), list) else ():
            found = find(inner, kind)
            if found is not None:
                return found
    return None


def content(s: Source, name: str) -> str | None:
    """The text of a special token such as "bos_token"."""
    for source in (s.settings, s.special):
        value: Any = source.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None
