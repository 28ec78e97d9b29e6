"""Stage "conformance": every kernel against float64 on the card, then whole layers, graphs, streams, files.

The cases of the kernels come from ``pennyweight.kernels.triton.self_test``; a failed case is a sentence of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pennyweight.kernels.triton.timing import distance

from . import weights
from .schemes import SCHEMES
from .stages import Case, Context

ROWS = (1, 5, 16, 33, 130)
# Relative error of a product whose output, and whose input in dynamic schemes, is rounded; against the same weight
# dequantized. Int8 and float8 inputs are the kernels' own rounding, and dominate there.
LIMITS = {"weights": 1e-2, "int8 inputs": 3e-2, "float8 inputs": 6e-2}
WEIGHT_ONLY = ("int4", "int4-symmetric", "int8", "float8", "nf4")
_COMPILE_SECONDS = 60.0


def cases(ctx: Context) -> Iterator[Case]:
    for scheme in SCHEMES:  # what a user runs comes first
        yield Case(f"layers: {scheme}", partial(layers, ctx, scheme), 90)  # the first runs the self-test
    for scheme in ("int4", "int8", "float8-dynamic"):
        yield Case(f"compile, save, load: {scheme}", partial(whole_path, ctx, scheme), _COMPILE_SECONDS)
    for name, run in (("_int_mm", int_mm), ("_scaled_mm by rows", scaled_mm), ("_weight_int4pack_mm", int4pack)):
        yield Case(f"torch: {name}", partial(run, ctx), 20)
    yield from _kernel_cases(ctx)


def _kernel_cases(ctx: Context) -> Iterator[Case]:
    """A module that is missing or cannot list its cases is one failed case."""
    try:
        found = list(ctx.kernels.self_test.cases(full=True))
    except Exception as error:
        why = error

        def fail() -> dict[str, Any]:
            raise why

        yield Case("kernels: list of cases", fail)
        return
    for case in found:
        yield Case(f"kernels: {case.name}", partial(_kernel, ctx, case), 30)


def _kernel(ctx: Context, case: Any) -> dict[str, Any]:
    failed = ctx.kernels.self_test.run(case, ctx.device)
    return {} if failed is None else {"error": str(failed)}


def limit_of(weight: Any) -> float:
    if weight.act is None:
        return LIMITS["weights"]
    return LIMITS["int8 inputs" if weight.act.spec.format.kind == "int" else "float8 inputs"]


def layer_size(scheme: str) -> tuple[int, int]:
    """Whole groups but no whole tiles; torch's products with low-precision inputs ask for multiples of 16."""
    return (1030, 1088) if scheme in WEIGHT_ONLY else (1024, 1024)


def layers(ctx: Context, scheme: str) -> dict[str, Any]:
    """F.linear of odd sizes: values, equal bits twice, a second stream, a graph, misaligned and strided inputs."""
    n, k = layer_size(scheme) if not ctx.dry else (64, 128)
    weight = weights.quantized(ctx, scheme, n, k)
    exact = weight.dequantize().double()
    limit, worst = limit_of(weight), 0.0
    found: dict[str, Any] = {"kernel": weights.kernel_of(weight), "limit": limit}
    with torch.no_grad():
        bias = torch.randn(n, device=ctx.device, dtype=torch.bfloat16)
        for m in ROWS:
            _poison(ctx, m * n)
            x = torch.randn(m, k, device=ctx.device, dtype=torch.bfloat16)
            y = F.linear(x, weight, bias)
            far = distance(y, x.double() @ exact.t() + bias.double())
            if not far <= limit:
                return {**found, "error": f"{m} rows: the relative error is {far:.2e}, the limit {limit:.0e}"}
            worst = max(worst, far)
            if not torch.equal(F.linear(x, weight, bias), y):
                return {**found, "error": f"{m} rows: a second call gives other bits"}
            for what, other in (("misaligned", _misaligned(x)), ("strided", _strided(x))):
                if not distance(F.linear(other, weight, bias), y) <= limit:
                    return {**found, "error": f"{m} rows: a {what} input gives another result"}
        found["error_found"] = worst
        if ctx.device == "cuda":
            found |= _stream_and_graph(x, weight, y)
    return found


def _poison(ctx: Context, numel: int) -> None:
    """Leave NaN in the memory that the next output gets."""
    torch.full((numel,), float("nan"), device=ctx.device, dtype=torch.bfloat16)


def _misaligned(x: Tensor) -> Tensor:
    """The same values two bytes behind a 16-byte boundary."""
    flat = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def _strided(x: Tensor) -> Tensor:
    return torch.stack((x, x), dim=-1)[..., 0]


def _stream_and_graph(x: Tensor, weight: Any, biased: Tensor) -> dict[str, Any]:
    expected = F.linear(x, weight)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        beside = F.linear(x, weight)
    stream.synchronize()
    if not torch.equal(beside, expected):
        return {"error": "a second stream gives other bits"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = F.linear(x, weight)
    for _ in range(2):  # twice: locks and workspaces must be as they were
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(captured, expected):
            far = distance(captured, expected)
            return {"error": f"the replay of a graph gives other bits, at a distance of {far:.1e}"}
    return {}


# -- torch's own products ----------------------------------------------------------------------------------------------


def int_mm(ctx: Context) -> dict[str, Any]:
    for m in (17, 32, 128):
        a = torch.randint(-128, 128, (m, 512), device=ctx.device, dtype=torch.int8)
        b = torch.randint(-128, 128, (256, 512), device=ctx.device, dtype=torch.int8)
        if not torch.equal(torch._int_mm(a, b.t()).double(), a.double() @ b.double().t()):
            return {"error": f"{m} rows: the sums are not exact"}
    return {}


def scaled_mm(ctx: Context) -> dict[str, Any]:
    if ctx.dry:
        return {}
    worst = 0.0
    for m in (1, 16, 33, 256):
        x = torch.randn(m, 512, device=ctx.device).to(torch.float8_e4m3fn)
        w = torch.randn(256, 512, device=ctx.device).to(torch.float8_e4m3fn)
        sx, sw = torch.rand(m, 1, device=ctx.device), torch.rand(1, 256, device=ctx.device)
        y = torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16, use_fast_accum=True)
        far = distance(y, (x.double() @ w.double().t()) * sx * sw)
        if not far <= LIMITS["weights"]:
            return {"error": f"{m} rows: the relative error is {far:.2e}"}
        worst = max(worst, far)
    return {"error_found": worst}


def int4pack(ctx: Context) -> dict[str, Any]:
    if ctx.dry:
        return {}
    n, k, group = 256, 1024, 64
    u = torch.randint(0, 16, (n, k), device=ctx.device, dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack((u[:, ::2] << 4 | u[:, 1::2]).to(torch.uint8), 8)
    scale = torch.rand(k // group, n, device=ctx.device).to(torch.bfloat16)
    zero = torch.randn(k // group, n, device=ctx.device).to(torch.bfloat16)
    x = torch.randn(5, k, device=ctx.device, dtype=torch.bfloat16)
    y = torch._weight_int4pack_mm(x, packed, group, torch.stack((scale, zero), -1).contiguous())
    spread = [t.t().double().repeat_interleave(group, 1) for t in (scale, zero)]
    far = distance(y, x.double() @ ((u.double() - 8) * spread[0] + spread[1]).t())
    return {"error_found": far} if far <= LIMITS["weights"] else {"error": f"the relative error is {far:.2e}"}


# -- the whole path ----------------------------------------------------------------------------------------------------


def whole_path(ctx: Context, scheme: str) -> dict[str, Any]:
    """quantize_ -> forward -> torch.compile(fullgraph) -> save -> load, on the device."""
    import pennyweight as pw

    def make() -> nn.Module:
        with torch.device(ctx.device):
            return nn.Sequential(nn.Linear(512, 768), nn.GELU(), nn.Linear(768, 256)).to(torch.bfloat16)

    model = make().requires_grad_(False)
    pw.quantize_(model, SCHEMES[scheme]())
    x = torch.randn(7, 512, device=ctx.device, dtype=torch.bfloat16)
    found: dict[str, Any] = {"kernel": weights.kernel_of(model[0].weight)}
    with torch.no_grad():
        y = model(x)
        with tempfile.TemporaryDirectory() as folder:
            pw.save(model, Path(folder) / "model")
            loaded = pw.load(Path(folder) / "model", make())
            if not torch.equal(loaded.to(ctx.device)(x), y):
                return {**found, "error": "the loaded model gives another result"}
        if not ctx.dry:  # Inductor needs a C compiler and half a minute on a CPU
            compiled = torch.compile(model, fullgraph=True, dynamic=False)
            far = distance(compiled(x), y)
            found["compiled"] = far
            if not far <= LIMITS["float8 inputs"]:
                return {**found, "error": f"torch.compile gives another result, at a distance of {far:.2e}"}
    return found
