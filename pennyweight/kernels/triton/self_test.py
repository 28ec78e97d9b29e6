"""The cases by which Triton kernels prove themselves on a device; :mod:`.self_test_verdict` keeps the verdict.

A few products of odd sizes are compared with float64, twice, in a second stream and in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.formats import E4M3, INT4, INT8, NF4
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from .. import gpu_arguments
from ..target import capability
from . import self_test_inputs, tiles, weight_only
from .layout import LAYOUT
from .self_test_inputs import Check, chained, result

# Greatest ||y - exact|| / ||exact||: the output, and with scales applied before the product each weight, is rounded to
# the compute dtype. Measured on a H100: 1.7e-3 and 2.2e-3 in bfloat16.
LIMITS = {torch.bfloat16: 4e-3, torch.float16: 8e-4}


@dataclass(frozen=True)
class Case:
    """One product of random numbers.

    how     "plain", or "stream", "graph", "unaligned", "dequantized", "chain"
    family  whose kernels it is for, see self_test_verdict.FAMILIES
    """

    name: str
    spec: QuantSpec
    dtype: torch.dtype
    m: int
    n: int
    k: int
    bias: bool = False
    how: str = "plain"
    family: str = "weight_only"

    def check(self, device: torch.device) -> str | None:
        """See :func:`run`."""
        w, x, bias = _inputs(self, device)
        if self.how == "chain":
            return _chain(self, w, x)
        exact = x.double() @ _weight(w).double().t()
        if bias is not None:
            exact = exact + bias.double()
        y = _product(self, w, x, bias)
        if y.shape != exact.shape or y.dtype is not self.dtype:
            return f"returned {tuple(y.shape)} {y.dtype}"
        if not bool(y.isfinite().all()):
            return "left NaN or infinity"
        error = float((y.double() - exact).norm() / exact.norm())
        if not error <= LIMITS[self.dtype]:
            return f"relative error {error:.1e}, at most {LIMITS[self.dtype]:.0e} is expected"
        if not torch.equal(y, _product(self, w, x, bias)):
            return "two runs differ"
        return None


def cases(full: bool = False) -> Iterator[Case | Check]:
    """The cases of the first use, or all."""
    yield from products(full)
    yield from self_test_inputs.cases(full)


def products(full: bool = False) -> Iterator[Case]:
    """Cases of the weight-only kernels: each format and scale that the layout has, and buckets of rows."""
    bf16, half = torch.bfloat16, torch.float16
    int4, int8 = QuantSpec(INT4, (64,), scale=bf16), QuantSpec(INT8, (-1,), scale=bf16)
    yield Case("int4, 1 row", int4, bf16, 1, 192, 1024, bias=True)
    yield Case("int4, 5 rows, odd sizes", int4, bf16, 5, 100, 1090)
    yield Case("int4, 33 rows", int4, bf16, 33, 130, 600, bias=True)
    yield Case("int4, 65 rows", int4, bf16, 65, 200, 512)
    yield Case("int8, 16 rows, odd sizes", int8, bf16, 16, 130, 777)
    yield Case("int8, float16, 1 row", int8.with_(scale=torch.float32), half, 1, 64, 640)
    yield Case("e4m3, 2 rows", QuantSpec(E4M3, (-1,)), bf16, 2, 70, 512)
    yield Case("nf4, 3 rows", QuantSpec(NF4, (64,)), bf16, 3, 64, 512)
    yield Case("int4, second stream", int4, bf16, 4, 128, 2048, how="stream")
    yield Case("int4, graph", int4, bf16, 1, 128, 2048, how="graph")
    yield Case("int4, unaligned input", int4, bf16, 2, 64, 512, how="unaligned")
    yield Case("int4, dequantized", int4, bf16, 3, 100, 300, how="dequantized")
    yield Case("int4, chain of products", int4, bf16, 1, 512, 512, how="chain")
    if not full:
        return
    for spec in dict.fromkeys(spec for spec, _ in LAYOUT.examples):
        yield Case(f"{spec}, 1 row", spec, bf16, 1, 130, 1090)
        yield Case(f"{spec}, 40 rows", spec, bf16, 40, 70, 600, bias=True)
        yield Case(f"{spec}, dequantized", spec, bf16, 2, 70, 600, how="dequantized")
        yield Case(f"{spec}, float16, 9 rows", spec, half, 9, 130, 1090)
    for m in (16, 17, 32, 64, 128, 129, 256, 500):
        yield Case(f"int4, {m} rows", int4, bf16, m, 500, 1090, bias=True)
        yield Case(f"int8, {m} rows", int8, bf16, m, 500, 1090)


def run(case: Case | Check, device: torch.device | str) -> str | None:
    """None if the kernel's result is right, the same twice and finite, else what is wrong with it."""
    device = torch.device(device)
    return gpu_arguments.on_device(case.check, device)(device)


def _weight(w: AffineQuantizedTensor) -> Tensor:
    return w.to_layout("plain").dequantize(torch.float32)


def _inputs(case: Case, device: torch.device) -> tuple[AffineQuantizedTensor, Tensor, Tensor | None]:
    generator = torch.Generator(device="cpu").manual_seed(case.m * 7919 + case.n + case.k)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    w = AffineQuantizedTensor.from_float(random(case.n, case.k) * 0.05, case.spec).to_layout("gpu")
    x = random(case.m, case.k).to(case.dtype)
    bias = random(case.n).to(case.dtype).to(device) if case.bias else None
    parts = w.parts.map(lambda t: t.to(device))
    return AffineQuantizedTensor(parts, w.spec, tuple(w.shape), case.dtype), x.to(device), bias


def _product(case: Case, w: AffineQuantizedTensor, x: Tensor, bias: Tensor | None) -> Tensor:
    static = weight_only.static_of(w.spec, tuple(w.stored_shape), case.dtype)
    held = weight_only.operand(static, w.spec, w.parts)
    if case.how == "dequantized":
        y = x.double() @ weight_only.dequantize(held, static).double().t()
        return y.to(case.dtype) if bias is None else (y + bias.double()).to(case.dtype)
    bound = weight_only.bind_static(static, w.spec)

    def product() -> Tensor:
        # the allocator hands this memory out again: what the kernel does not write is NaN
        torch.full((case.m, case.n), float("nan"), dtype=case.dtype, device=x.device)
        y = bound.run(x, held, bias)
        assert y is not None
        return y

    if case.how == "unaligned":
        x = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    return result(product, case.how if case.how in ("stream", "graph") else "plain", x.device)


def _chain(case: Case, w: AffineQuantizedTensor, x: Tensor) -> str | None:
    static = weight_only.static_of(w.spec, tuple(w.stored_shape), case.dtype)
    held = weight_only.operand(static, w.spec, w.parts)
    target, _, processors = weight_only.card(x.device)
    tile = tiles.by_rule(target, static.decoding, case.m, small=static.small)
    tile = replace(tile, ahead=x.device.type == "cuda" and capability(target) >= 90)

    return chained(lambda y: weight_only.launch(y, held, None, static, tile, processors), x)


def prove(device: torch.device | str, full: bool = False, family: str | None = None) -> dict[str, str | None]:
    """The result of each case of a family, or of all, on a device: None, or what failed."""
    found: dict[str, str | None] = {}
    for case in cases(full):
        if family not in (None, case.family):
            continue
        try:
            found[case.name] = run(case, device)
        except Exception as error:  # reported: a kernel that cannot be compiled or launched is not used
            found[case.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found
