"""Atomic writes of ONNX files."""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from typing import Any

from ..io.atomic_write import folder_lock, partial_path, rename_into_place, sync_folder

# the limit of protobuf is 2 GiB; the rest is for the graph
INLINE = 1_900_000_000


def save(model: Any, path: str, max_inline_bytes: int = INLINE) -> list[str]:
    """Write a model and return its files: one, or, above that many bytes, a second one, ``NAME.data``.

    Both are written under temporary names. The data is renamed before the file that references it, to a name that no
    file there has, such as ``NAME.0a1b2c3d.data``: so the old model stays intact until the new one is complete. Data of
    the old one is removed last.
    """
    import onnx_ir as ir

    folder, name = os.path.split(os.path.abspath(path))
    inside = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    with folder_lock(folder), partial_path(folder, name) as stage:
        old = _data_files(folder, name)
        outside = None
        if inside > max_inline_bytes:
            outside = f"{name}.{secrets.token_hex(4)}.data" if old else f"{name}.data"
        ir.save(model, os.path.join(stage, name), external_data=outside)
        written = [name] if outside is None else [outside, name]
        for part in written:
            with open(os.path.join(stage, part), "rb+") as f:
                os.fsync(f.fileno())
        for part in written:
            rename_into_place(os.path.join(stage, part), os.path.join(folder, part))
        for part in old:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, part))
        if old:
            sync_folder(folder)
    return [os.path.join(folder, part) for part in reversed(written)]


def _data_files(folder: str, name: str) -> list[str]:
    """Files with data of the model called ``name``."""
    ours = re.compile(re.escape(name) + r"(\.[0-9a-f]{8})?\.data")
    return [found for found in os.listdir(folder) if ours.fullmatch(found)]
