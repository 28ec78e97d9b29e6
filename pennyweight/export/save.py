"""ONNX files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from ..io.write import publish

# protobuf holds 2 GiB at most; the rest is for the graph itself
INLINE = 1_900_000_000


def save(model: Any, path: str, max_inline_bytes: int = INLINE) -> list[str]:
    """Write a model and return the files: one, or, with more bytes than that in it, a second, ``NAME.data``.

    Both are written under other names first. The data is put in place before the file that speaks of it.
    """
    import onnx_ir as ir

    folder, name = os.path.split(os.path.abspath(path))
    inside = sum(v.const_value.nbytes for v in model.graph.initializers.values())
    outside = f"{name}.data" if inside > max_inline_bytes else None
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as temp:
        ir.save(model, os.path.join(temp, name), external_data=outside)
        written = [outside, name] if outside else [name]
        for part in written:
            assert part is not None
            with open(os.path.join(temp, part), "rb+") as f:
                os.fsync(f.fileno())
        for part in written:
            publish(os.path.join(temp, part), os.path.join(folder, part))
    return [os.path.join(folder, part) for part in reversed(written)]
