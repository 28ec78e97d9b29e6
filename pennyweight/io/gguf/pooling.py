"""Token pooling of embedding models: the files of sentence-transformers <-> ``<arch>.pooling_type``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..checkpoint import resolve_inside
from ..errors import CheckpointError
from ..strict_json import parse
from .config import POOLING
from .tokenizer_source import read_bytes

MAX_BYTES = 1 << 20
_TYPE = "sentence_transformers.models."
# flags of a Pooling module's config.json, which GGUF supports
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def pooling_of(folder: str) -> str | None:
    """The pooling that a folder's modules.json declares, a key of ``POOLING``; None if there is no such file.

    Raises CheckpointError for an invalid file, and for a pooling that GGUF does not support.
    """
    real = os.path.realpath(folder)
    if not os.path.lexists(os.path.join(real, "modules.json")):
        return None
    path, modules = _json(real, "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise CheckpointError(path, None, "must hold a list of objects")
    paths = [m.get("path") for m in modules if str(m.get("type")).rpartition(".")[2] == "Pooling"]
    if not paths:
        return None
    if len(paths) > 1 or not isinstance(paths[0], str) or not paths[0]:
        raise CheckpointError(path, None, "must name one folder of a Pooling module")
    path, config = _json(real, os.path.join(paths[0], "config.json"))
    if not isinstance(config, dict):
        raise CheckpointError(path, None, "must hold an object")
    modes = [k for k, v in config.items() if k.startswith("pooling_mode") and v is True]
    if len(modes) == 1 and modes[0] in _FLAGS:
        return _FLAGS[modes[0]]
    named = config.get("pooling_mode")  # newer files name it
    if not modes and isinstance(named, str) and named.removesuffix("token") in POOLING:
        return named.removesuffix("token")
    raise CheckpointError(path, None, f"pooling {', '.join(modes) or named!r} is not supported by GGUF")


def pooling_files(kv: Mapping[str, Any]) -> dict[str, bytes]:
    """{path in the folder: bytes} for sentence-transformers; empty if the file has no or an unsupported pooling.

    Embeddings are normalized, as in llama.cpp's tools.
    """
    arch = kv.get("general.architecture")
    names = {v: k for k, v in POOLING.items() if k != "none"}
    kind, size = kv.get(f"{arch}.pooling_type"), kv.get(f"{arch}.embedding_length")
    if type(kind) is not int or kind not in names or type(size) is not int:
        return {}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files: dict[str, Any] = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": _TYPE + name} for i, (path, name) in enumerate(modules)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            **{flag: name == names[kind] for flag, name in _FLAGS.items()},
        },
    }
    return {name: (json.dumps(data, indent=2) + "\n").encode() for name, data in files.items()}


def _json(folder: str, name: str) -> tuple[str, Any]:
    path = resolve_inside(folder, name)
    try:
        return path, parse(read_bytes(path, MAX_BYTES), max_bytes=MAX_BYTES, max_depth=32, floats=True)
    except CheckpointError:
        raise
    except ValueError as e:
        raise CheckpointError(path, None, str(e)) from e
