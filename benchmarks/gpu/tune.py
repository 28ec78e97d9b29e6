"""Stage "tune": times every candidate tile of the weight-only kernels, per width, rows and size.

A case is one (bits, bucket of rows, size). A candidate replaces the shipped line if it is 2 % faster, so that lines do
not change with the noise. A candidate whose values are wrong, or that does not compile, is left out and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from functools import partial
from math import prod
from typing import Any

from torch.nn import functional as F

from . import weights
from .schemes import BITS
from .stages import Case, Context
from .timing import Timing, distance

HYSTERESIS = 1.02
FINALISTS = 3
_LIMIT = 1e-2  # distance from the dequantized product
# Bucket of rows -> the rows that are timed; the geometric mean decides
ROWS = {16: (1, 16), 64: (64,), 32: (32,), 256: (256,), 128: (128,), 512: (1024,)}
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
    candidates = list(dict.fromkeys([shipped, *tiles.candidates(target, bits, bucket)]))
    dropped: dict[str, str] = {}
    rough = _times(ctx, candidates, held, xs, dropped, samples=3, check=True)
    if not rough:
        return {"error": f"no candidate works: {dropped}"}
    finalists = sorted(rough, key=lambda tile: rough[tile].us)[:FINALISTS]
    finalists += [shipped] if shipped in rough and shipped not in finalists else []
    final = _times(ctx, finalists, held, xs, dropped, samples=7, check=False) or rough
    ctx.timer.release()
    best = min(final, key=lambda tile: final[tile].us)
    if shipped in final and final[shipped].us < HYSTERESIS * final[best].us:
        best = shipped
    return {
        "bits": bits, "m": bucket, "n": n, "k": k, "family": "int", "size": size_name(tiles, n, k), "target": target,
        "tile": as_dict(best), **final[best].values(), "shipped": as_dict(shipped),
        "shipped_us": final[shipped].us if shipped in final else None,
        "candidates": [{"tile": as_dict(t), "us": rough[t].us} for t in sorted(rough, key=lambda tile: rough[tile].us)],
        "dropped": dropped, "complete": len(rough) + len(dropped) >= len(candidates),
    }  # fmt: skip


def _times(
    ctx: Context, candidates: Sequence[Any], held: Sequence[Any], xs: dict[int, Sequence[Any]], dropped: dict[str, str],
    samples: int, check: bool,
) -> dict[Any, Timing]:  # fmt: skip
    """Tile -> geometric mean of its microseconds over the rows, largest spread; stops at the deadline."""
    out: dict[Any, Timing] = {}
    run = ctx.kernels.weight_only.run_tile
    expected = {m: F.linear(x[0], held[0].dequantize()) for m, x in xs.items()} if check else {}
    for tile in candidates:
        if ctx.left() <= 0:
            break
        try:
            times = []
            for m, rows in xs.items():
                if check:
                    far = distance(run(rows[0], held[0], None, tile), expected[m])
                    if not far <= _LIMIT:
                        raise ValueError(f"{m} rows: differs by {far:.2e} from the dequantized product")
                calls = [partial(run, x, w, None, tile) for x, w in zip(rows, held, strict=True)]
                times.append(ctx.timer.time(calls, samples=samples, check=check))
            middle = prod(timing.us for timing in times) ** (1 / len(times))
            out[tile] = Timing(middle, max(timing.spread for timing in times), samples, len(held))
        except Exception as error:  # too much shared memory, a spill, wrong values: a result of this candidate
            dropped[str(as_dict(tile))] = f"{type(error).__name__}: {error}"[:300]
            ctx.timer.synchronize()  # raises where the context is lost, which ends the case
    return out


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
