"""Stage "facts": the card, its two ceilings, and the hardware questions that only a device answers."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .stages import Case, Context

PACKAGES = ("triton", "numpy", "torchao", "bitsandbytes", "transformers")
TOOLS = ("ncu", "compute-sanitizer", "nvidia-smi", "gcc")


def cases(ctx: Context) -> Iterator[Case]:
    yield Case("machine", lambda: machine(ctx), 30)
    yield Case("copy rate", lambda: copy_rate(ctx), 30)
    yield Case("bf16 product", lambda: bf16_product(ctx), 30)
    yield Case("bf16 subnormals in fma", lambda: subnormals(ctx), 30)
    yield Case("e4m3 subnormals in dot", lambda: float8_codes(ctx), 30)
    yield Case("row-wise _scaled_mm on a second stream and in a graph", lambda: scaled_mm_streams(ctx), 20)


def machine(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    import pennyweight

    found |= {"pennyweight": pennyweight.__version__, "tools": {name: shutil.which(name) for name in TOOLS}}
    if ctx.dry:
        return {**found, "card": "dry run", "target": "cuda:sm_90", "driver": "none", "l2": ctx.timer.l2, "memory": 0}
    card = torch.cuda.get_device_properties(0)
    return {
        **found, "card": card.name, "target": f"cuda:sm_{card.major}{card.minor}", "l2": ctx.timer.l2,
        "memory": card.total_memory, "processors": card.multi_processor_count, "cuda": torch.version.cuda,
        "kernel": platform.release(), **_smi(),
    }  # fmt: skip


def _smi() -> dict[str, Any]:
    """What nvidia-smi reads; it changes nothing."""
    names = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader", "-i", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return {"driver": "unknown", "nvidia-smi": f"{type(error).__name__}: {error}"}
    read = dict(zip(names, (part.strip() for part in done.stdout.splitlines()[0].split(",")), strict=False))
    return {"driver": read.pop("driver_version", "unknown"), "nvidia-smi": read}


def copy_rate(ctx: Context) -> dict[str, Any]:
    """Bytes read and written per second, in a copy of 4 GB to 4 GB."""
    if ctx.dry:
        return {"bytes_per_s": 3.0e12, "spread": 0.01, "bytes": 8 << 30}
    source = torch.empty(1 << 30, dtype=torch.int32, device=ctx.device).random_()
    target = torch.empty_like(source)
    timing = ctx.timer.events(lambda: target.copy_(source))
    nbytes = 2 * source.nbytes
    return {"bytes_per_s": nbytes / timing.us * 1e6, "bytes": nbytes, **timing.values()}


def bf16_product(ctx: Context) -> dict[str, Any]:
    """cuBLAS at 8192 x 8192 x 8192 on random data."""
    n = 8192
    if ctx.dry:
        return {"tflops": 790.0, "spread": 0.01}
    a, b = (torch.randn(n, n, device=ctx.device, dtype=torch.bfloat16) for _ in range(2))
    timing = ctx.timer.events(lambda: a @ b, count=10)
    return {"tflops": 2 * n**3 / timing.us / 1e6, **timing.values()}


# -- questions: {"ok": bool}; "no" is an answer, an exception is none --------------------------------------------------


def subnormals(ctx: Context) -> dict[str, Any]:
    """Whether bfloat16 bits u < 256 times 2**127 are u * 2**-6 exactly, alone and with - 8 * 2**-6."""
    if ctx.dry:
        return {"ok": True}
    from .facts_kernels import scaled_bits

    u = torch.arange(256, device=ctx.device)
    wrong = {}
    for name, zero in (("without zero point", 0), ("with zero point 8", 8)):
        y = torch.full((256,), float("nan"), device=ctx.device, dtype=torch.bfloat16)
        scaled_bits[(1,)](u.to(torch.int16), y, 256, 2.0**127, -zero * 2.0**-6)
        expected = (u - zero).double() * 2.0**-6
        wrong[name] = u[y.double() != expected].tolist()
    return {"ok": not any(wrong.values()), "wrong_codes": wrong}


def float8_codes(ctx: Context) -> dict[str, Any]:
    """Whether the bytes 0..15 count as u * 2**-9 in a float8 product: W4A8 rests on it."""
    if ctx.dry:
        return {"ok": True}
    from .facts_kernels import float8_dot

    m, n, k = 64, 16, 128
    u = torch.randint(0, 16, (m, k), device=ctx.device)
    b = torch.randint(-4, 5, (n, k), device=ctx.device).float()
    y = torch.full((m, n), float("nan"), device=ctx.device)
    codes, bytes_of_b = u.to(torch.uint8), b.to(torch.float8_e4m3fn).view(torch.uint8)
    float8_dot[(1,)](codes, bytes_of_b, y, m, n, k)
    far = (y.double() - (u.double() @ b.double().t()) * 2.0**-9).abs().max()
    return {"ok": float(far) == 0.0, "largest_difference": float(far), "largest_sum": float(y.abs().max())}


def scaled_mm_streams(ctx: Context) -> dict[str, Any]:
    """Whether row-wise ``_scaled_mm`` gives the default stream's bits on a second stream and in a graph."""
    if ctx.dry:
        return {"ok": True}
    f8 = torch.float8_e4m3fn
    found = {}
    for m in (64, 512):
        x = torch.randn(m, 4096, device=ctx.device).to(f8)
        w = torch.randn(4096, 4096, device=ctx.device).to(f8)
        sx, sw = torch.rand(m, 1, device=ctx.device), torch.rand(1, 4096, device=ctx.device)

        def product(x: Any = x, w: Any = w, sx: Any = sx, sw: Any = sw) -> torch.Tensor:
            y = torch._scaled_mm(x, w.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16, use_fast_accum=True)
            return y[0] if isinstance(y, tuple) else y

        expected = product()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            beside = product()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = product()
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        exact = (x.float() @ w.float().t()) * sx * sw
        found[f"m {m}"] = {
            "stream": torch.equal(beside, expected), "graph": torch.equal(captured, expected),
            "error": float((expected.float() - exact).norm() / exact.norm()),
        }  # fmt: skip
    return {"ok": all(one["stream"] and one["graph"] for one in found.values()), "by_rows": found}
