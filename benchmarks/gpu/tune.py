"""Stage "tune": times candidate tiles of the weight-only kernel, per family of weights and bucket of rows.

pennyweight/kernels/triton/tuning.py chooses. A line of tiles.json is for a family and a bucket, so its schemes and
several sizes count together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pennyweight.kernels.triton.tuning import ROWS, choices, fastest

from . import weights
from .schemes import TUNED
from .stages import Case, Context

SIZES = ((8192, 8192), (4096, 4096), (14336, 4096))
_FEW = 16  # rows up to which all sizes count: there programs share tiles, and their number decides
_CASE_SECONDS = 90.0  # candidates may still have to be compiled


def cases(ctx: Context) -> Iterator[Case]:
    """The most used first: all families of one bucket before the next."""
    for bucket in ROWS:
        for family, (_, buckets) in TUNED.items():
            if bucket in buckets:
                yield Case(f"{family} m{bucket}", partial(tune, ctx, family, bucket), _CASE_SECONDS)


def sizes(bucket: int) -> tuple[tuple[int, int], ...]:
    return SIZES if bucket <= _FEW else SIZES[:2]


def target_of(ctx: Context) -> str:
    return str(ctx.results.value("facts", "machine", "target", "cuda:sm_90"))


def tune(ctx: Context, family: str, bucket: int) -> dict[str, Any]:
    """Times of the candidates; "tile" is the line to ship, None for dequantizing."""
    tiles, target = ctx.kernels.tiles, target_of(ctx)
    products, static = {}, None
    for scheme in TUNED[family][0]:
        for n, k in ((ctx.size(n), ctx.size(k)) for n, k in sizes(bucket)):
            weight = packed(ctx, scheme, n, k)
            held = weights.copies(ctx, weight)
            static = ctx.kernels.weight_only.static_of(weight.spec, (n, k), torch.bfloat16)
            own = tiles.family(static.decoding, small=static.small, offset=static.offset)
            if own != family:
                raise ValueError(f"{scheme} is of family {own}")
            for rows in ROWS[bucket]:
                m = rows if not ctx.dry else min(rows, 64)
                pairs = list(zip(weights.inputs(ctx, m, k, len(held)), held, strict=True))
                products[f"{scheme}, {m} rows, {n}x{k}"] = pairs
    assert static is not None
    shipped = tiles.choose(target, "", static.decoding, bucket, small=static.small, offset=static.offset)
    listed = choices(tiles.candidates(target, static.decoding, bucket, small=static.small), bucket)
    found = fastest(listed, shipped, products, ctx.kernels.weight_only.prepared, ctx.timer, ctx.left)
    ctx.timer.release()
    order = sorted(found.rough, key=lambda tile: found.rough[tile].us)
    return {
        "family": family, "m": bucket, "target": target, "tile": as_dict(found.tile), **found.timing.values(),
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
    family = next((name for name, (schemes, _) in TUNED.items() if scheme in schemes), "")
    bucket = next((b for b in sorted(ROWS) if m <= b), max(ROWS))
    found = ctx.results.cases("tune").get(f"{family} m{bucket}", {})
    return found if "tile" in found else None
