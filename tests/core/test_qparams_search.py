"""Searches for parameters: errors of blocks, sums in a fixed order, rules of the range on the ends of blocks alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pennyweight.core import blocks, formats, qparams_search, quantize_backends
from pennyweight.core.numerics import encode, store_qparams, stored_value
from pennyweight.core.qparams import BY_RANGE, RULES, choose, default_rule, scale_floor
from pennyweight.core.qparams_search import pairwise_sum, shrunk_range, squared_errors
from pennyweight.core.spec import QuantSpec
from pennyweight.kernels.cpu import library
from tests.algorithms.solvers.test_qparam_grid import SPECS as ROW_SPECS
from tests.kernels.cpu.instruction_set import instruction_set

F = formats
SPECS: dict[str, Any] = {
    **ROW_SPECS,
    "blocks of rows": QuantSpec(F.INT4, (4, 12)),
    "whole rows": QuantSpec(F.INT8, (1, -1)),
    "odd groups": QuantSpec(F.UINT4, (1, 7), offset=torch.float32),
    "zero points and offsets of rows": QuantSpec(F.UINT8, (-1, 1), zero_point=torch.int8),
    "one bit": QuantSpec(F.INT1, (1, 33)),
    "quantized scales": QuantSpec(F.INT4, (1, 16), scale=QuantSpec(F.INT8, (1, 2))),
    "mx": QuantSpec(F.E2M1, (1, 32), scale=QuantSpec(F.E8M0, (1, 1), scale=None)),
}


@pytest.mark.parametrize("k", [0, 1, 7, 15, 16, 17, 32, 47, 48, 80, 112, 128, 1000])
def test_a_sum_in_pairs(k: int) -> None:
    x = torch.randn(5, k)
    torch.testing.assert_close(pairwise_sum(x), x.sum(1), rtol=1e-5, atol=1e-5)
    for row, found in zip(x.tolist(), pairwise_sum(x).tolist(), strict=True):
        vectors = [torch.tensor((row[i : i + 16] + [0.0] * 16)[:16]) for i in range(0, k, 16)] or [torch.zeros(16)]
        while len(vectors) > 1:
            vectors += [torch.zeros(16)] * (len(vectors) % 2)
            vectors = [a + b for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
        lanes = vectors[0]
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        assert float(lanes) == found


def view_of(spec: QuantSpec, n: int, k: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = blocks.pad(torch.randn(n, k) * 0.1, spec.block)
    x[: n // 4] *= 1e-30  # scales whose reciprocals overflow
    return blocks.split(x, blocks.counts(spec.block, x.shape))


@pytest.mark.parametrize(
    "isa", [pytest.param(None, id="reference"), *(library.isas() if library.available() is True else ())]
)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_errors_of_blocks(name: str, isa: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference against sums in float64; native code against the reference, to the bit."""
    spec = SPECS[name]
    for n, k, threads in ((8, 96, 1), (5, 33, 2), (70, 480, 2)):
        view = view_of(spec, n, k)
        whole = view.flatten(2).flatten(0, 1)
        p = store_qparams(choose(whole, spec, default_rule(spec)), spec)[1]
        columns = torch.rand(1, 1, *view.shape[2:])
        for weight in (None, torch.rand(view.shape), columns.expand(view.shape), columns):
            with monkeypatch.context() as patch:
                backend = quantize_backends.CONVERSIONS["cpu"]
                patch.setitem(
                    quantize_backends.CONVERSIONS, "cpu", replace(backend, squared_errors=lambda *a: NotImplemented)
                )
                want = squared_errors(view, spec, p, weight)
            if isa is None:
                error = (stored_value(encode(view, spec, p), spec, p) - view).double().square()
                exact = (error if weight is None else error * weight).sum((1, 3))
                torch.testing.assert_close(want.double(), exact, rtol=1e-5, atol=1e-30)
                continue
            with instruction_set(isa, threads), monkeypatch.context() as patch:
                if spec.format is not F.E4M3:  # no reference to fall back to
                    patch.setattr(qparams_search, "pairwise_sum", lambda x: None)
                found = squared_errors(view, spec, p, weight)
            assert torch.equal(want, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", sorted(BY_RANGE))
def test_the_ends_of_a_block_say_what_the_block_says(name: str, dtype: torch.dtype) -> None:
    if name.startswith("mx"):
        spec = QuantSpec(F.E2M1, (1, 16), scale=QuantSpec(F.E8M0, (1, 1), scale=None))
    elif name == "minmax":
        spec = QuantSpec(F.UINT4, (1, 16), offset=torch.float32, mid=8)
    elif name == "asymmetric":
        spec = QuantSpec(F.UINT4, (1, 16), zero_point=torch.int8)
    else:
        spec = QuantSpec(F.INT4, (1, 16))
    torch.manual_seed(0)
    x = torch.randn(12, 64) * torch.logspace(-30, 4, 12).unsqueeze(1)
    x[3], x[4] = 0, x[4].abs() + 1
    view = blocks.split(x.to(dtype), (12, 4))
    found = shrunk_range(view, spec, name, None)
    for share in (1.0, 0.98, 0.77, 0.5):
        if spec.offset is None or share == 1:
            whole = view * share if share != 1 else view
        else:
            middle = view.amin((1, 3), True) / 2 + view.amax((1, 3), True) / 2
            whole = middle + (view - middle) * share
        want = RULES[name](whole, spec, scale_floor(view.dtype, spec, None))
        for a, b in zip(found(share), want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
