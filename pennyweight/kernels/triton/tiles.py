"""Tile sizes of the weight-only kernel: measured lines (tiles.json), and a rule for what was not measured.

A line of tiles.json names the results file of ``scripts/gpu`` that it was measured in. ``pennyweight doctor --device
cuda --tune`` writes lines for the user's own device into the cache folder; they come before the shipped ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...support.environment import cache_folder
from ..target import capability
from .codes import Decoding
from .layout import columns

SHIPPED = Path(__file__).with_name("tiles.json")
BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # rows of the input, rounded up
# Shared memory of one multiprocessor, bytes, and multiprocessors of a common card, by compute capability: CUDA C++
# Programming Guide, "Compute Capabilities".
_SHARED = {80: 163_840, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
_PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 103: 148, 120: 170}
_GROUPS = (90, 100, 103)  # whose matrix unit serves groups of four warps
_TENSOR_MEMORY = (100, 103)
DEFAULT = 90  # for devices of unknown capability


@dataclass(frozen=True)
class Tile:
    """bm, bn   rows of the input and of the weight that a program computes
    w        words of each row and field per step: 2 w columns of each plane
    warps, stages  Triton's num_warps and num_stages
    fill     programs for each multiprocessor, up to which a sum is split
    ahead    whether the kernel starts before the one in front of it has ended (compute capability 9.0 and later)
    before   whether scales per group are applied to weights, before the product, instead of to the sums of each group;
             always in groups of less than 64 columns
    """

    bm: int
    bn: int
    w: int
    warps: int
    stages: int
    before: bool = False
    fill: int = 2
    ahead: bool = False

    def __str__(self) -> str:
        more = f"{' before' * self.before}{f' fill {self.fill}' if self.fill != 2 else ''}{' ahead' * self.ahead}"
        return f"{self.bm}x{self.bn} w{self.w} {self.warps} warps {self.stages} stages{more}"


def bucket(m: int) -> int:
    """The bucket of m rows."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def shared_memory(target: str) -> int:
    return _SHARED.get(capability(target), 65_536 if target.startswith("hip") else _SHARED[DEFAULT])


def processors(target: str) -> int:
    """Multiprocessors of a common card of the target, where the device is not at hand."""
    return _PROCESSORS.get(capability(target), _PROCESSORS[DEFAULT])


def most_rows(target: str) -> int:
    """The most rows of a tile. With tensor memory (sm_100) eight, of products by single warps: for more, Triton 3.7
    passes weights through that memory, and made kernels without a product of some tiles."""
    return 8 if capability(target) in _TENSOR_MEMORY else 256


def step_bytes(d: Decoding, tile: Tile) -> int:
    """Bytes of codes and inputs that one step of the kernel reads."""
    cols = columns(d) * tile.w // 32
    return cols * d.bits // 8 * tile.bn + cols * 2 * tile.bm


def by_rule(target: str, d: Decoding, m: int, *, small: bool) -> Tile:
    """A tile for what was not measured. small: groups of less than 64 columns, which need w = 32.

    As many stages as leave room for two programs on a multiprocessor, and steps of as many words as that allows. The
    weights are operand A of the matrix unit, so 64 rows of them are one warp group.
    """
    least = 16 if target.startswith("hip") else 8  # rows of the matrix unit
    bm = max(min(bucket(m), 128, most_rows(target)), least)
    limit = shared_memory(target)
    wide = bm > 64 and capability(target) not in _GROUPS and not small  # four warps would spill registers
    tile = Tile(bm, 128 if wide else 64, 32, 8 if wide else 2 if bm == 8 else 4, 2, bm > 64)
    long = bm <= 64 and not (bm == 8 and len(d.pieces) > 1)  # two warps have too few registers for several pieces
    for w in (32,) if small else (32, 16, 8) if long else (16, 8):
        tile = replace(tile, w=w)
        fit = limit // 2 // step_bytes(d, tile)
        if fit >= 2 or (fit and w == 8):
            return replace(tile, stages=min(4 if bm <= 64 else 3, fit + 1))
    fit = max(1, limit // step_bytes(d, tile))
    while fit < 2 and tile.bm > 16:  # a step of 32 words is required: fewer rows
        tile = replace(tile, bm=tile.bm // 2)
        fit = max(1, limit // step_bytes(d, tile))
    return replace(tile, stages=min(3, max(2, fit)))


# (bn, w, warps, stages, before) worth measuring, for up to 8, 32, 64 rows and more. For few rows memory decides: many
# bytes in flight, scales applied late. For many rows the matrix unit does: long products, scales applied to weights.
# Eight rows use the matrix unit by warps, not by groups of four warps, which cannot have less than 16 rows.
_ONE = ((64, 32, 2, 4, False), (64, 32, 4, 4, False), (64, 32, 2, 3, False), (128, 32, 4, 3, False))
_FEW = (
    (64, 32, 4, 4, False), (64, 32, 4, 3, False), (64, 32, 4, 6, False), (128, 32, 8, 3, False), (128, 32, 4, 3, False),
)  # fmt: skip
_SOME = (
    (64, 32, 4, 3, False), (64, 32, 4, 2, False), (128, 32, 8, 2, False), (64, 16, 4, 4, False), (64, 16, 4, 4, True),
    (128, 16, 8, 4, True), (64, 32, 4, 3, True), (64, 32, 4, 4, False),
)  # fmt: skip
_MANY = (
    (64, 16, 4, 3, True), (128, 16, 8, 3, True), (128, 16, 8, 2, True), (256, 16, 8, 3, True), (256, 16, 8, 2, True),
    (128, 32, 8, 3, True),
)  # fmt: skip


def _needs(target: str, d: Decoding, tile: Tile) -> int:
    """Bytes of the steps that a program holds: one less than stages. The matrix unit of sm_90 reads inputs from shared
    memory while the next step is loaded, so one more step of them."""
    again = columns(d) * tile.w // 32 * 2 * tile.bm if capability(target) == 90 and tile.bm > 8 else 0
    return step_bytes(d, tile) * max(1, tile.stages - 1) + again


def candidates(target: str, d: Decoding, m: int, *, small: bool) -> list[Tile]:
    """Tiles worth measuring for a bucket of rows, the rule's first. None of them exceeds the shared memory."""
    rows = bucket(m)
    if rows == 8:
        which = [(8, shape, fill) for fill in (2, 4) for shape in _ONE] + [(16, shape, 2) for shape in _FEW[:2]]
    elif rows <= 32:
        which = [(rows, shape, 2) for shape in _FEW] + [(rows, shape, 4) for shape in _FEW[:2]]
    elif rows == 64:
        which = [(64, shape, 2) for shape in _SOME]
    else:
        which = [(128, shape, 2) for shape in _MANY] + [(64, shape, 2) for shape in (*_SOME[:3], _MANY[3])]
        which += [(256, shape, 2) for shape in _MANY[:2]] if rows > 128 else []
    found = [by_rule(target, d, m, small=small)]
    for bm, (bn, w, warps, stages, before), fill in which:
        tile = Tile(bm, bn, w, warps, stages, before, fill)
        if not (small and w < 32) and _needs(target, d, tile) <= shared_memory(target) - 4096:
            found.append(tile)
    found = [tile for tile in found if tile.bm <= most_rows(target)]
    if rows <= 64 and capability(target) >= 90:
        found += [replace(tile, ahead=True) for tile in found[:3]]
    return list(dict.fromkeys(found))


def split(programs: int, steps: int, most: int) -> int:
    """Programs that share one tile: the greatest power of two with at most ``most`` programs in all, and at least two
    steps for each."""
    parts = 1
    while programs * parts * 2 <= most and parts * 4 <= steps:
        parts *= 2
    return parts


def user_file() -> Path:
    """Where ``doctor --tune`` keeps the lines of this user's devices."""
    return cache_folder() / "tiles.json"


@lru_cache(maxsize=1)
def lines() -> tuple[Mapping[str, Any], ...]:
    """The user's lines, then the shipped ones: {"device" or "target", "family", "m", "tile", "source"}.

    A line without "tile" says that dequantizing the weight once and multiplying with torch is faster.
    """
    return (*read(user_file()), *read(SHIPPED))


def read(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a file of tiles; none if there is no file. Raises ValueError if it is something else."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text("utf-8"))["lines"]
        for line in found:
            if line["tile"] is not None:
                Tile(**line["tile"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path} is not a file of tiles ({error}); delete it, or write it again: pennyweight doctor --device cuda "
            "--tune"
        ) from error
    return found


def family(d: Decoding, *, small: bool, offset: bool = False) -> str:
    """What tiles are measured for: "int4", "float8", "table4"; "-small" for groups of less than 64 columns, "-offset"
    for weights with one."""
    return f"{d.kind}{d.bits}{'-small' if small else ''}{'-offset' if offset else ''}"


@lru_cache(maxsize=4096)
def choose(target: str, device: str, d: Decoding, m: int, *, small: bool, offset: bool = False) -> Tile | None:
    """The tile for a bucket m of rows; None: dequantize and multiply with torch.

    device: name of the card, or "". A line for the card comes first, then one for its target, then the rule.
    """
    names = dict.fromkeys((family(d, small=small, offset=offset), family(d, small=small)))
    for key, value, name in ((*pair, name) for pair in (("device", device), ("target", target)) for name in names):
        for line in lines():
            if value and line.get(key) == value and line["family"] == name and line["m"] == m:
                return None if line["tile"] is None else Tile(**line["tile"])
    if m >= _DEQUANTIZE_FROM or m > 8 * most_rows(target):
        return None
    return by_rule(target, d, m, small=small)


_DEQUANTIZE_FROM = 512  # rows from which one pass over the weight costs less than a slower product, on a H100


def write(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Write lines as a file of tiles, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    rows = ",\n".join("  " + json.dumps(dict(line), sort_keys=True) for line in found)
    fresh.write_text(f'{{"lines": [\n{rows}\n]}}\n', "utf-8")
    fresh.replace(path)
    lines.cache_clear()
    choose.cache_clear()
