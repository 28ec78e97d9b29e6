"""``pennyweight inspect``: lists the tensors of a checkpoint from its headers."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..planning.layer_kinds import kind_of_layer
from .inspect_groups import StoredEntry, groups, totals
from .options import AllowPickle, AllTensors, Json, Traceback
from .output import check_report_path, report_errors, show, table

if TYPE_CHECKING:
    from ..io import Opened
    from ..io.manifest import Meta


EPILOG = """Examples:
  pennyweight inspect OUT_DIR
  pennyweight inspect org/model --all
  pennyweight inspect model.gguf --json"""


# -- contents of a checkpoint ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """version: of the Pennyweight format. file_bytes: the files' true sizes, headers and index included."""

    path: str
    format: str
    version: int | None
    files: dict[str, int]
    tensors: list[StoredEntry] = field(default_factory=list)

    @property
    def quantized(self) -> list[StoredEntry]:
        return [t for t in self.tensors if t.scheme]

    @property
    def plain(self) -> list[StoredEntry]:
        return [t for t in self.tensors if not t.scheme]

    @property
    def file_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def bits_per_weight(self) -> float | None:
        """Of quantized tensors, scales and other parts included; None if there are none."""
        return _bits(sum(t.bytes for t in self.quantized), self.quantized)

    @property
    def bits_per_parameter(self) -> float | None:
        """Of the checkpoint: 8 times the files' true sizes over the number of elements; tied tensors count once."""
        return _bits(self.file_bytes, self.tensors)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": 1,
            "path": self.path,
            "format": self.format,
            "format_version": self.version,
            "files": self.files,
            "file_bytes": self.file_bytes,
            "tensor_bytes": sum(t.bytes for t in self.tensors),
            "bits_per_weight": self.bits_per_weight,
            "bits_per_parameter": self.bits_per_parameter,
            "kinds": totals(self.tensors),
            "tensors": [
                {
                    **asdict(t),
                    "shape": list(t.shape),
                    "tied": list(t.tied),
                    "kind": kind_of_layer(t.name, rank=len(t.shape)),
                }
                for t in self.tensors
            ],
        }


def _bits(size: int, tensors: list[StoredEntry]) -> float | None:
    numel = sum(t.numel for t in tensors)
    return 8 * size / numel if numel else None


def contents(path: str, allow_pickle: bool = False) -> Contents:
    """Read headers and metadata only. Raises CheckpointError."""
    from ..io import open

    with open(path, allow_pickle=allow_pickle) as checkpoint:
        return contents_of(checkpoint)


def contents_of(checkpoint: Opened) -> Contents:
    """As :func:`contents`, for an open checkpoint."""
    from ..io.manifest import Manifest, version_of

    tied: dict[str, tuple[str, ...]] = {}
    for alias, name in checkpoint.aliases.items():
        tied[name] = (*tied.get(name, ()), alias)
    tensors = [
        StoredEntry(
            name, h.kind.shape, _dtype(h.kind.dtype), "" if h.meta is None else scheme(h.meta), h.nbytes,
            tied.get(name, ()), h.word, "" if h.meta is None else _in_words(h.meta),
        )
        for name, h in checkpoint.held.items()
    ]  # fmt: skip
    files = {os.path.basename(path): os.path.getsize(path) for path in checkpoint.files}
    version = version_of(Manifest(checkpoint.quantized)) if checkpoint.format == "pennyweight" else None
    return Contents(checkpoint.path, checkpoint.format, version, files, sorted(tensors, key=lambda t: _natural(t.name)))


def scheme(meta: Meta) -> str:
    """Formatted like a Scheme."""
    parts = "".join(f" {part}" for part in ("perm", "pre_scale") if getattr(meta, part))
    return f"{meta.spec}{parts}" + ("" if meta.act is None else f" × {meta.act}")


def _in_words(meta: Meta) -> str:
    """As "int4, groups of 64, symmetric, bf16 scales"."""
    from ..planning.scheme import describe, describe_activation

    scaled = "; inputs scaled per channel" if meta.pre_scale else ""
    return (
        describe(meta.spec, len(meta.shape))
        + scaled
        + ("" if meta.act is None else f"; {describe_activation(meta.act)}")
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.2 before layers.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"([0-9]+)", name)]


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# -- the command -------------------------------------------------------------------------------------------------------


@report_errors
def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint of any format: a folder, a file, an index or a Hub id.")
    ],
    all_tensors: AllTensors = False,
    allow_pickle: AllowPickle = False,
    json_path: Json = "",
    traceback: Traceback = False,
) -> None:
    """List the tensors of a checkpoint.

    Prints how tensors are stored, their bytes, and totals by kind of layer. Tensors whose names differ only in a number
    share a line. Reads headers only.
    """
    check_report_path(json_path, None)
    from ..io import local_path

    found = contents(local_path(path, allow_pickle), allow_pickle)
    show(found.to_dict(), lambda: text(found, all_tensors), json_path)


def text(found: Contents, all_tensors: bool = False) -> str:
    """The table and its totals."""
    from ..planning.quantize_report import size

    formats = {"safetensors": "plain safetensors", "pennyweight": f"pennyweight format, version {found.version}"}
    lines = [
        f"{found.path}: {formats.get(found.format, found.format)}",
        "",
        _listing(found.tensors) if all_tensors else _grouped(found.tensors),
        "",
        _kinds(found.tensors),
        "",
    ]
    for word, some in (("quantized", found.quantized), ("not quantized", found.plain)):
        nbytes = sum(t.bytes for t in some)
        lines.append(f"{len(some)} tensors {word}, {nbytes:,} bytes ({size(nbytes)})")
    if found.bits_per_weight is not None:
        lines.append(f"{found.bits_per_weight:.3f} bits per quantized weight, scales and zero points included")
    for name, nbytes in found.files.items():
        lines.append(f"{name}: {nbytes:,} bytes")
    if found.bits_per_parameter is not None:
        bits = f"{found.bits_per_parameter:.3f} bits per number, headers included"
        lines.append(f"{found.file_bytes:,} bytes ({size(found.file_bytes)}) in all: {bits}")
    return "\n".join(lines)


def _listing(tensors: list[StoredEntry]) -> str:
    """A line for each tensor."""
    rows = []
    for t in tensors:
        stored = t.scheme or t.dtype
        if t.word:
            stored = f"{t.word}: {stored}" if t.scheme else t.word
        rows.append((t.name, "×".join(map(str, t.shape)), stored, f"{t.bytes:,}", _tied(t)))
    return table(("tensor", "shape", "stored as", "bytes", ""), rows, ("shape", "bytes"))


def _grouped(tensors: list[StoredEntry]) -> str:
    """A line for each group of equal tensors, with their number and total bytes."""
    from ..planning.quantize_report import size

    rows = []
    for name, some in groups(tensors):
        t = some[0]
        stored = t.scheme_text or t.dtype
        if t.word:
            stored = f"{t.word}: {stored}" if t.scheme else t.word
        count = str(len(some)) if len(some) > 1 else ""
        note = _tied(t) if len(some) == 1 else ""
        rows.append((name, count, "×".join(map(str, t.shape)), stored, size(sum(t.bytes for t in some)), note))
    return table(("tensors", "count", "shape", "stored as", "size", ""), rows, ("count", "shape", "size"))


def _tied(t: StoredEntry) -> str:
    return f"tied: {', '.join(t.tied)}" if t.tied else ""


def _kinds(tensors: list[StoredEntry]) -> str:
    """A line for each kind of layer: tensors, parameters, bytes, share."""
    from ..planning.quantize_report import size

    found = totals(tensors)
    whole = sum(row["bytes"] for row in found.values())
    rows = [
        (
            name, str(row["tensors"]), f"{row['parameters']:,}", size(row["bytes"]),
            f"{row['bytes'] / whole:.1%}" if whole else "",
            f"{8 * row['bytes'] / row['parameters']:.2f}" if row["parameters"] else "",
        )
        for name, row in found.items()
    ]  # fmt: skip
    columns = ("kind of layer", "tensors", "parameters", "size", "share", "bits per parameter")
    return table(columns, rows, columns[1:])
