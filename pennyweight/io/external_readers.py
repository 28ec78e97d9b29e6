"""Readers that live on a floor above, by name: their modules are imported when a file asks for them, not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any

TORCHAO = "pennyweight.compat.torchao.reading"
# A key that the metadata of safetensors files have -> the module whose ``open_safetensors(checkpoint, config)`` reads
# them, and its name for the format, ``FORMAT``
BY_METADATA = {"tensor_names": TORCHAO}
PICKLES = TORCHAO  # ``open_pickle(path, mmap)``


def reader(module: str) -> Any:
    """A module of these."""
    return import_module(module)
