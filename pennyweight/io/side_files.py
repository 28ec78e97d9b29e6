"""The small files beside a checkpoint's weights: its configs and tokenizer, taken along as data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ..models.configs import AOBaseConfig
from ..models.configs.plain_data import config_to_data
from .checkpoint import inside
from .errors import CheckpointError
from .manifest import VERSION
from .outline import read_config
from .write import write_bytes

# Data only: a .py beside a checkpoint is code that nobody asked to have carried along
ENDINGS = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab", ".md")
NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
MAX_BYTES = 64 << 20
METHOD = "pennyweight"


def quantization_config(config: AOBaseConfig | None, left_out: Sequence[str] | None = None) -> dict[str, Any]:
    """The "quantization_config" of config.json: whose files these are, and by which config they were made.

    config None, or not one of the library's: null. left_out: modules that were not to be quantized.
    """
    try:
        data = None if config is None else config_to_data(config)
    except ValueError:  # a config of somebody's own; the weights say themselves what they are
        data = None
    names = None if left_out is None else list(left_out)
    return {"quant_method": METHOD, "version": VERSION, "config": data, "modules_to_not_convert": names}


def copy_side_files(src: str, dst: str, quantization_config: dict[str, Any]) -> list[str]:
    """Copy them from a source folder; config.json with a "quantization_config". Returns names.

    Raises CheckpointError for a link that leads out of the folder.
    """
    folder = os.path.realpath(src)
    if not os.path.isdir(folder):
        return []
    copied = []
    for name in sorted(os.listdir(folder)):
        wanted = name.endswith(ENDINGS) or name.partition(".")[0] in NAMES
        if not wanted or name.startswith(".") or name.endswith(".index.json"):
            continue
        path = inside(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_BYTES:
            continue
        if name == "config.json":
            config = {**(read_config(src) or {}), "quantization_config": quantization_config}
            data = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        else:
            data = _read(path)
        write_bytes(os.path.join(dst, name), data)
        copied.append(name)
    return copied


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read(MAX_BYTES)
    except OSError as e:
        raise CheckpointError(path, None, f"cannot be read: {e.strerror}") from e
