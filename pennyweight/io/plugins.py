"""Readers that live on a floor above, by name: their modules are imported when a file asks for them, not before.

A reader of this table has ``claims(checkpoint)`` and ``open_safetensors(checkpoint, config)``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

READERS = {"torchao": "pennyweight.compat.torchao.reading"}


def reader(name: str) -> Any:
    """The module of a reader."""
    return import_module(READERS[name])
