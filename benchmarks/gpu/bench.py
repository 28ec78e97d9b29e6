"""Stage "bench": each goal beside cuBLAS bfloat16 of the same run, and beside other libraries' products; inputs that
are quantized, beside torch's ops; the host's time for a call.

A case times ours, bf16, ours, bf16: the ratio is of the medians, and the difference of the two visits is its spread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pennyweight.core.formats import E4M3, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.kernels.activation import encode_activation
from pennyweight.kernels.triton import quantize
from pennyweight.kernels.triton.timing import Timing

from . import tune, weights
from .peers import PEERS, Peer
from .schemes import GOALS, Goal
from .stages import Case, Context

_LAUNCH = tuple((scheme, 16, 4096, 4096) for scheme in ("int4", "int8", "float8-dynamic", "int8-dynamic", "w4a8"))
# (whether an RMSNorm is in front, format, rows, columns) -> goal, as a share of the copy rate
_INPUTS = {
    (False, "int8", 8192, 4096): None, (True, "int8", 8192, 4096): 0.88,
    (False, "float8", 8192, 4096): None, (True, "float8", 8192, 4096): 0.88,
}  # fmt: skip


def cases(ctx: Context) -> Iterator[Case]:
    """Ours and bf16 for every goal, then the tuned tiles, then the others: a crash or the deadline costs those last."""
    for goal in GOALS:
        yield Case(goal.name, partial(measure, ctx, goal), 60)
    for goal in GOALS:
        if _tile(ctx, goal) is not None:
            yield Case(f"{goal.name}: tuned tile", partial(tuned, ctx, goal), 40)
    for key, share in _INPUTS.items():
        name = f"{'RMSNorm and ' * key[0]}quantize {key[1]} {key[2]}x{key[3]}"
        yield Case(name, partial(inputs, ctx, *key, share), 40)
    for scheme, m, n, k in _LAUNCH:
        yield Case(f"launch: {scheme} m{m} {n}x{k}", partial(launch, ctx, scheme, m, n, k), 30)
    for goal in GOALS:
        for name, peer in PEERS.get(goal.scheme, {}).items():
            yield Case(f"{goal.name}: {name}", partial(beside, ctx, goal, name, peer), 40)


def measure(ctx: Context, goal: Goal) -> dict[str, Any]:
    """Times in microseconds, ratios to bf16, and the share of the copy rate that the least bytes take."""
    n, k = ctx.size(goal.n), ctx.size(goal.k)
    m = goal.m if not ctx.dry else min(goal.m, 64)
    plain = weights.float_weight(ctx, n, k)
    weight = weights.quantized(ctx, goal.scheme, n, k)
    found: dict[str, Any] = {
        "scheme": goal.scheme, "m": goal.m, "n": goal.n, "k": goal.k, "kernel": weights.kernel_of(weight),
        "goal": goal.goal, "stretch": goal.stretch, "share_goal": goal.share, "anchor": goal.anchor,
    }  # fmt: skip
    theirs = weights.linear_calls(ctx, m, weights.copies(ctx, plain))
    held = weights.copies(ctx, weight)
    ours = weights.linear_calls(ctx, m, held)
    visits = [(_time(ctx, ours), _time(ctx, theirs)) for _ in range(2)]
    mine, base = (_both([visit[i] for visit in visits]) for i in (0, 1))
    found |= {"us": mine[0], "spread": mine[1], "bf16_us": base[0], "bf16_spread": base[1], "ratio": base[0] / mine[0]}
    rate = ctx.results.value("facts", "copy rate", "bytes_per_s")
    if rate:
        found["share"] = weights.traffic(weight, m) / mine[0] * 1e6 / rate
        found["bf16_share"] = weights.traffic(plain, m) / base[0] * 1e6 / rate
    found["tflops"] = 2 * m * n * k / mine[0] / 1e6
    del ours, theirs, held
    ctx.timer.release()
    return found


def _time(ctx: Context, calls: Sequence[Any]) -> Timing:
    return ctx.timer.time(calls, samples=5, sample_us=5000.0)


def _both(visits: Sequence[Timing]) -> tuple[float, float]:
    """(mean microseconds, the larger of the spread within a visit and between them)."""
    first, second = (visit.us for visit in visits)
    middle = (first + second) / 2
    return middle, max(abs(first - second) / middle, *(visit.spread for visit in visits))


def inputs(ctx: Context, norm: bool, name: str, m: int, k: int, goal: float | None) -> dict[str, Any]:
    """Quantizing m rows of bfloat16 per token: the share of the copy rate, and times the speed of torch's ops."""
    act = ActivationSpec(QuantSpec(INT8 if name == "int8" else E4M3, (-1,)))
    m, k = ctx.size(m), ctx.size(k)
    count = ctx.timer.copies(3 * m * k)
    xs = [torch.randn(m, k, device=ctx.device, dtype=torch.bfloat16) for _ in range(count)]
    weight = torch.rand(k, device=ctx.device, dtype=torch.bfloat16)

    def torchs(x: Tensor) -> Any:
        return encode_activation(F.rms_norm(x, (k,), weight, 1e-6) if norm else x, act, None, None).codes

    def ours(x: Tensor) -> Any:
        return (
            quantize.rms_norm_encode(x, weight, 1e-6, act) if norm else quantize.quantized(x, act, None, None)
        ).codes

    timing, theirs = (_time(ctx, [partial(run, x) for x in xs]) for run in (ours, torchs))
    rate = ctx.results.value("facts", "copy rate", "bytes_per_s")
    share = (3 * m * k + 4 * m) / timing.us * 1e6 / rate if rate else None
    return {"quantizes": name, **timing.values(), "share": share, "torch_us": theirs.us, "goal_share": goal}


def _tile(ctx: Context, goal: Goal) -> dict[str, Any] | None:
    return tune.best(ctx, goal.scheme, goal.m)


def tuned(ctx: Context, goal: Goal) -> dict[str, Any]:
    """With the tile that this run has found; the table of tiles may not have it yet."""
    tile = (_tile(ctx, goal) or {})["tile"]
    line = None if tile is None else ctx.kernels.tiles.Tile(**tile)
    n, k = ctx.size(goal.n), ctx.size(goal.k)
    m = goal.m if not ctx.dry else min(goal.m, 64)
    held = weights.copies(ctx, tune.packed(ctx, goal.scheme, n, k))
    xs = weights.inputs(ctx, m, k, len(held))
    prepare = ctx.kernels.weight_only.prepared
    timing = _time(ctx, [prepare(x, w, None, line) for x, w in zip(xs, held, strict=True)])
    return {"of": goal.name, "peer": "tuned tile", "tile": tile, **_beside_bf16(ctx, goal, timing)}


def beside(ctx: Context, goal: Goal, name: str, peer: Peer) -> dict[str, Any]:
    """Another library's product; one that is not installed is no failure."""
    n, k = ctx.size(goal.n), ctx.size(goal.k)
    if ctx.dry:
        return {"of": goal.name, "peer": name, **_beside_bf16(ctx, goal, Timing(100.0, 0.01, 5, 2))}
    try:
        calls = peer(ctx, goal.m, weights.float_weight(ctx, n, k))
        timing = _time(ctx, calls)
    except Exception as error:  # another library's failure is a result about it
        ctx.timer.synchronize()  # raises if the context is lost
        return {"of": goal.name, "peer": name, "refused": f"{type(error).__name__}: {error}"[:300]}
    return {"of": goal.name, "peer": name, **_beside_bf16(ctx, goal, timing)}


def _beside_bf16(ctx: Context, goal: Goal, timing: Timing) -> dict[str, Any]:
    bf16 = ctx.results.value("bench", goal.name, "bf16_us")
    return {**timing.values(), "ratio": bf16 / timing.us if bf16 else None}


def launch(ctx: Context, scheme: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Microseconds of the host per eager call, ours and bf16."""
    n, k = ctx.size(n), ctx.size(k)
    weight = weights.quantized(ctx, scheme, n, k)
    plain = weights.float_weight(ctx, n, k)
    calls = [weights.linear_calls(ctx, m, [w, w])[0] for w in (weight, plain)]
    ours, theirs = (ctx.timer.launch(call) for call in calls)
    return {"kernel": weights.kernel_of(weight), "host_us": ours, "bf16_host_us": theirs}
