"""Stored tensors, groups of equal ones, and totals by kind of layer, for ``pennyweight inspect``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..planning.layer_kinds import KINDS, kind_of_layer


@dataclass(frozen=True)
class StoredEntry:
    """One logical tensor. bytes: of all its stored parts. scheme: "" if it is not quantized; scheme_text: the same in
    words. word: the name of its type in the file's format."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    bytes: int
    tied: tuple[str, ...] = ()
    word: str = ""
    scheme_text: str = ""

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


def groups(tensors: Iterable[StoredEntry]) -> list[tuple[str, list[StoredEntry]]]:
    """Tensors that differ only in the numbers of their names, under a name such as ``layers.[0-31].q_proj``; in order
    of first appearance."""
    found: dict[tuple[object, ...], list[StoredEntry]] = {}
    for t in tensors:
        pattern = tuple("" if part.isdigit() else part for part in t.name.split("."))
        found.setdefault((pattern, t.shape, t.dtype, t.scheme, t.word), []).append(t)
    return [(_label([t.name for t in some]), some) for some in found.values()]


def _label(names: list[str]) -> str:
    """One name for names that differ in numbers; ``.weight`` is left out."""
    parts = [sorted(set(column)) for column in zip(*(name.split(".") for name in names), strict=True)]
    pieces = [column[0] if len(column) == 1 else f"[{_ranges(sorted(map(int, column)))}]" for column in parts]
    return ".".join(pieces).removesuffix(".weight")


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def totals(tensors: Iterable[StoredEntry]) -> dict[str, dict[str, int]]:
    """tensors, parameters and bytes of each kind that occurs; tied tensors count once."""
    out = {name: {"tensors": 0, "parameters": 0, "bytes": 0} for name in KINDS}
    for t in tensors:
        row = out[kind_of_layer(t.name, rank=len(t.shape))]
        row["tensors"] += 1
        row["parameters"] += t.numel
        row["bytes"] += t.bytes
    return {name: row for name, row in out.items() if row["tensors"]}
