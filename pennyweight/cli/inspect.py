"""``pennyweight inspect``: lists the tensors of a checkpoint from its headers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import Traceback, report_errors
from .printing import table

if TYPE_CHECKING:
    from .checkpoint_contents import Contents


@report_errors
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint of any format: a folder, a file, or an index.")
    ],
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read torch.save files; only from sources you trust.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    traceback: Traceback = False,
) -> None:
    """List the tensors of a checkpoint.

    Prints how each tensor is stored, its bytes, and totals. Reads headers only.
    """
    from .checkpoint_contents import contents

    found = contents(path, allow_pickle)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else text(found))


def text(found: Contents) -> str:
    """The table and its totals."""
    from ..planning.report import size

    kind = {"safetensors": "plain safetensors", "pennyweight": f"pennyweight format, version {found.version}"}
    rows = []
    for t in found.tensors:
        note = f"tied: {', '.join(t.tied)}" if t.tied else ""
        stored = t.scheme or t.dtype
        if t.word:
            stored = f"{t.word}: {stored}" if t.scheme else t.word
        rows.append((t.name, "×".join(map(str, t.shape)), stored, f"{t.bytes:,}", note))
    lines = [
        f"{found.path}: {kind.get(found.format, found.format)}",
        "",
        table(("tensor", "shape", "stored as", "bytes", ""), rows, ("shape", "bytes")),
        "",
    ]
    for word, some in (("quantized", found.quantized), ("not quantized", found.plain)):
        held = sum(t.bytes for t in some)
        lines.append(f"{len(some)} tensors {word}, {held:,} bytes ({size(held)})")
    if found.bits_per_weight is not None:
        lines.append(f"{found.bits_per_weight:.3f} bits per quantized weight, scales and zero points included")
    for name, nbytes in found.files.items():
        lines.append(f"{name}: {nbytes:,} bytes")
    if found.bits_per_parameter is not None:
        bits = f"{found.bits_per_parameter:.3f} bits per number, headers included"
        lines.append(f"{found.file_bytes:,} bytes ({size(found.file_bytes)}) in all: {bits}")
    return "\n".join(lines)
