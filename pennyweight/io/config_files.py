"""Small files next to a checkpoint's weights: configs and tokenizer, copied as data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.spec import dtype_name
from ..planning.configs import AOBaseConfig
from ..planning.configs.serialize import config_to_data
from .atomic_write import write_bytes
from .manifest import Manifest, version_of
from .strict_json import read_bytes, read_object, resolve_inside

# Data files only: a .py file beside a checkpoint is code, and is not copied
ENDINGS = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab", ".md")
NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
MAX_BYTES = 64 << 20
MAX_CONFIG_BYTES = 4 << 20
_LEFT = (".index.json", ".progress.json")  # of the old weights, and of an unfinished run
METHOD = "pennyweight"
# A key of config.json that names the weights file; here it names a file that never exists. transformers opens it
# before it fills the model. A process without the METHOD quantizer, which would initialize every quantized weight
# randomly, thus stops with an error that quotes this name. With METHOD registered, the adapter removes the key.
WEIGHTS_KEY = "transformers_weights"
NO_SUCH_FILE = "quantized by Pennyweight, import pennyweight before from_pretrained.safetensors"


def read_config(folder: str) -> dict[str, Any] | None:
    """config.json of a folder, None if there is none. Raises CheckpointError for an invalid one."""
    return read_side_json(folder, "config.json")


def read_side_json(folder: str, name: str) -> dict[str, Any] | None:
    """A JSON object beside the weights, None if there is none. Raises CheckpointError for an invalid one."""
    real = os.path.realpath(folder)
    return read_object(real, name, MAX_CONFIG_BYTES) if os.path.isdir(real) else None


def quantization_config(config: AOBaseConfig | None, left_out: Sequence[str] | None = None) -> dict[str, Any]:
    """The "quantization_config" of config.json: quantization method, format version, and config used.

    config: null if None or not a config of this library. left_out: modules that were excluded from quantization.
    """
    try:
        data = None if config is None else config_to_data(config)
    except ValueError:  # a user-defined config; the weights describe themselves
        data = None
    names = None if left_out is None else list(left_out)
    return {"quant_method": METHOD, "version": version_of(Manifest()), "config": data, "modules_to_not_convert": names}


def folder_of(path: str) -> str:
    """The folder of a checkpoint, given the folder path or the path of a file in it."""
    return path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))


def method_files(folder: str) -> list[str]:
    """Paths of the small files in a folder that describe the weight format."""
    paths = [os.path.join(folder, name) for name in ("config.json", "quantize_config.json")]
    return [path for path in paths if os.path.isfile(path)]


def copy_side_files(
    src: str, dst: str, quantization_config: dict[str, Any] | None, dtype: torch.dtype | None = None
) -> list[str]:
    """Copy the side files of a source folder; config.json is rewritten by :func:`config_bytes`. Returns names.

    Raises CheckpointError for a link that points outside the folder.
    """
    folder = os.path.realpath(src)
    if not os.path.isdir(folder):
        return []
    found = [name for name in sorted(os.listdir(folder)) if _wanted(name)]
    for module in sorted(os.listdir(folder)):  # sentence-transformers keeps each module's config in a folder
        if module[:1].isdigit() and os.path.isdir(os.path.join(folder, module)):
            names = sorted(os.listdir(resolve_inside(folder, module)))
            found += [os.path.join(module, name) for name in names if name.endswith(".json") and _wanted(name)]
    copied = []
    for name in found:
        path = resolve_inside(folder, name)
        if not os.path.isfile(path) or os.path.getsize(path) > MAX_BYTES:
            continue
        data = read_bytes(path, MAX_BYTES)
        if name == "config.json":
            data = config_bytes(read_config(src) or {}, quantization_config, dtype)
        os.makedirs(os.path.dirname(os.path.join(dst, name)), exist_ok=True)
        write_bytes(os.path.join(dst, name), data)
        copied.append(name)
    return copied


def _wanted(name: str) -> bool:
    known = name.endswith(ENDINGS) or name.partition(".")[0] in NAMES
    return known and not name.startswith(".") and not name.endswith(_LEFT) and name != "quantize_config.json"


def config_bytes(
    config: Mapping[str, Any], quantization_config: dict[str, Any] | None, dtype: torch.dtype | None = None
) -> bytes:
    """config.json with this "quantization_config" in place of the old one; ``dtype``: the new dtype of its floats."""
    kept = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config", WEIGHTS_KEY)}
    if quantization_config is not None:
        kept["quantization_config"] = quantization_config
        if quantization_config.get("quant_method") == METHOD and "model_type" in config:
            kept[WEIGHTS_KEY] = NO_SUCH_FILE
    if dtype is not None:
        kept["dtype" if "dtype" in kept else "torch_dtype"] = dtype_name(dtype)  # new transformers reads both
    return (json.dumps(kept, indent=2, ensure_ascii=False) + "\n").encode()


def marked_config(folder: str) -> bytes | None:
    """config.json of a transformers model in a folder, marked as containing quantized weights of this library.

    None if there is no config.json, or if it already has a quantization config.
    """
    path = os.path.join(folder, "config.json")
    try:
        config = json.loads(read_bytes(path, MAX_BYTES)) if os.path.isfile(path) else None
    except ValueError:  # not a transformers file
        return None
    if not isinstance(config, dict) or "model_type" not in config or "quantization_config" in config:
        return None
    return config_bytes(config, quantization_config(None))
