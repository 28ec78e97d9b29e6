"""Stage "tune": times every candidate tile of the weight-only kernels, per width, rows and size.

A case is one (bits, bucket of rows, size); pennyweight/kernels/triton/tuning.py chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

from pennyweight.kernels.triton.tuning import ROWS, fastest

from . import weights
from .schemes import BITS
from .stages import Case, Context

SIZES = ((8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336))
_CASE_SECONDS = 90.0  # candidates may still have to be compiled


def cases(ctx: Context) -> Iterator[Case]:
    """The most used first: all widths and sizes of one bucket before the next."""
    for bucket in ROWS:
        for bits in BITS:
            for n, k in SIZES if bits != 2 else SIZES[:1]:
                run = partial(tune, ctx, bits, bucket, ctx.size(n), ctx.size(k))
                yield Case(f"int{bits} m{bucket} {n}x{k}", run, _CASE_SECONDS)


def target_of(ctx: Context) -> str:
    return str(ctx.results.value("facts", "machine", "target", "cuda:sm_90"))


def tune(ctx: Context, bits: int, bucket: int, n: int, k: int) -> dict[str, Any]:
    """Times of the candidates; "tile" is the line to ship."""
    tiles, target = ctx.kernels.tiles, target_of(ctx)
    weight = weights.quantized(ctx, BITS[bits], n, k)
    if weight.spec.layout != "gpu" and not ctx.dry:
        weight = weight.to_layout("gpu")
    held = weights.copies(ctx, weight)
    xs = {m: weights.inputs(ctx, m, k, len(held)) for m in ROWS[bucket]}
    shipped = tiles.choose(target, bits, ROWS[bucket][0], n, k)
    run = ctx.kernels.weight_only.run_tile
    found = fastest(tiles.candidates(target, bits, bucket), shipped, held, xs, run, ctx.timer, ctx.left)
    ctx.timer.release()
    order = sorted(found.rough, key=lambda tile: found.rough[tile].us)
    return {
        "bits": bits, "m": bucket, "n": n, "k": k, "family": "int", "size": size_name(tiles, n, k), "target": target,
        "tile": as_dict(found.tile), **found.timing.values(), "shipped": as_dict(shipped),
        "shipped_us": found.shipped_us, "complete": found.complete,
        "candidates": [{"tile": as_dict(tile), "us": found.rough[tile].us} for tile in order],
        "dropped": {str(as_dict(tile)): why for tile, why in found.dropped.items()},
    }  # fmt: skip


def as_dict(tile: Any) -> dict[str, Any]:
    return asdict(tile) if is_dataclass(tile) and not isinstance(tile, type) else dict(vars(tile))


def size_name(tiles: Any, n: int, k: int) -> str:
    """The name of the size's bucket, as the table of tiles has it."""
    named = getattr(tiles, "size_of", None)
    return str(named(n, k)) if named is not None else f"{n}x{k}"


def best(ctx: Context, bits: int, m: int, n: int, k: int) -> dict[str, Any] | None:
    """The tuned line for a product of these sizes, if this run has found one."""
    bucket = next((b for b in sorted(ROWS) if m <= b), max(ROWS))
    found = ctx.results.cases("tune").get(f"int{bits} m{bucket} {n}x{k}", {})
    return found.get("tile")
