"""Readers in higher-level modules, by name; imported only when a file needs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TORCHAO = "pennyweight.compat.torchao.reading"
# Key in the safetensors metadata -> the module whose ``open_safetensors(checkpoint, config)`` reads such files;
# its ``FORMAT`` is the name of the format
BY_METADATA = {"tensor_names": TORCHAO}
PICKLES = TORCHAO  # ``open_pickle(path, mmap)``


def reader(module: str) -> Any:
    """Import one of these modules."""
    return import_module(module)
