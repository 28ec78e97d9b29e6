"""Stage "tune": times candidate tiles of the weight-only kernel, per scheme and bucket of rows.

pennyweight/kernels/triton/tuning.py chooses; a line of tiles.json is for a family and a bucket, so several sizes count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pennyweight.kernels.triton.tuning import ROWS, fastest, shortlist

from . import weights
from .schemes import TUNED
from .stages import Case, Context

SIZES = ((8192, 8192), (4096, 4096))
_CASE_SECONDS = 90.0  # candidates may still have to be compiled


def cases(ctx: Context) -> Iterator[Case]:
    """The most used first: all schemes of one bucket before the next."""
    for bucket in ROWS:
        for scheme in TUNED:
            if bucket in TUNED[scheme]:
                yield Case(name_of(scheme, bucket), partial(tune, ctx, scheme, bucket), _CASE_SECONDS)


def name_of(scheme: str, bucket: int) -> str:
    return f"{scheme} m{bucket}"


def target_of(ctx: Context) -> str:
    return str(ctx.results.value("facts", "machine", "target", "cuda:sm_90"))


def tune(ctx: Context, scheme: str, bucket: int) -> dict[str, Any]:
    """Times of the candidates; "tile" is the line to ship, None for dequantizing."""
    target = target_of(ctx)
    products, static = {}, None
    for n, k in SIZES:
        n, k = ctx.size(n), ctx.size(k)
        weight = packed(ctx, scheme, n, k)
        held = weights.copies(ctx, weight)
        static = ctx.kernels.weight_only.static_of(weight.spec, (n, k), torch.bfloat16)
        for m in ROWS[bucket]:
            m = m if not ctx.dry else min(m, 64)
            products[f"{m} rows, {n}x{k}"] = list(zip(weights.inputs(ctx, m, k, len(held)), held, strict=True))
    assert static is not None
    small = static.small
    tiles = ctx.kernels.tiles
    shipped = tiles.choose(target, "", static.decoding, bucket, small=small, offset=static.offset)
    candidates = shortlist(tiles.candidates(target, static.decoding, bucket, small=small), bucket)
    found = fastest(candidates, shipped, products, ctx.kernels.weight_only.prepared, ctx.timer, ctx.left)
    ctx.timer.release()
    order = sorted(found.rough, key=lambda tile: found.rough[tile].us)
    return {
        "scheme": scheme, "m": bucket, "target": target, "tile": as_dict(found.tile), **found.timing.values(),
        "family": tiles.family(static.decoding, small=small, offset=static.offset),
        "shipped": as_dict(shipped), "shipped_us": found.shipped_us, "complete": found.complete,
        "candidates": [{"tile": str(tile), "us": round(found.rough[tile].us, 3)} for tile in order],
        "dropped": {str(tile): why for tile, why in found.dropped.items()},
    }  # fmt: skip


def packed(ctx: Context, scheme: str, n: int, k: int) -> Any:
    """The weight in layout "gpu", whichever row of the table would run it."""
    weight = weights.quantized(ctx, scheme, n, k)
    return weight if ctx.dry or weight.spec.layout == "gpu" else weight.to_layout("gpu")


def as_dict(tile: Any) -> dict[str, Any] | None:
    return None if tile is None else asdict(tile)


def best(ctx: Context, scheme: str, m: int) -> dict[str, Any] | None:
    """What this run has found for a scheme and rows: a case of the stage, if it has one."""
    bucket = next((b for b in sorted(ROWS) if m <= b), max(ROWS))
    found = ctx.results.cases("tune").get(name_of(scheme, bucket), {})
    return found if "tile" in found else None
