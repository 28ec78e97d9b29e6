"""Kernels that quantize inputs, and products of such inputs: without a GPU, interpreted and compiled."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core.formats import E4M3, E5M2, INT4, INT8, UINT8
from pennyweight.core.spec import INT8_ROW, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.activation import encode_activation
from pennyweight.kernels.table import Case, explain, select
from pennyweight.kernels.triton import quantize, scaled_mm, self_test_inputs

from .interpreter import interpret

BF16 = torch.bfloat16
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the kernels are written in Triton, which is not installed"
)


# -- values, interpreted -----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "which", "count"),
    [
        ("bfloat16", "some", 24),
        *(pytest.param(d, "all", 36, marks=pytest.mark.exhaustive) for d in ("bfloat16", "float16", "float32")),
    ],
)
def test_codes_are_those_of_the_cpu(dtype: str, which: str, count: int) -> None:
    found = interpret("quantized", dtype, which)
    assert found["wrong"] == {}
    assert found["count"] == 12 * count


@needs_triton
@pytest.mark.parametrize("bias", [5, pytest.param(70, marks=pytest.mark.exhaustive)])
def test_products_of_codes(bias: int) -> None:
    found = interpret("product_tiles", bias)
    assert found["wrong"] == {}
    assert found["count"] == 8
    assert found["locks"], "no program shared a tile"
    assert set(found["locks"]) == {0}


@needs_triton
def test_a_row_is_the_same_in_any_batch() -> None:
    assert interpret("same_in_any_batch")


@needs_triton
def test_packed_weights_take_quantized_inputs() -> None:
    found = interpret("quantized_inputs")
    assert found["wrong"] == {}
    assert found["count"] == 4


def test_the_quotient_by_a_reciprocal_is_rounded_correctly() -> None:
    """The device's division, with fused multiply-adds computed in float64: the remainder is exact there too. Zeros keep
    their sign, and so do numbers that become zero."""
    generator, n = torch.Generator().manual_seed(0), 1 << 20
    x = torch.randn(n, generator=generator) * torch.exp2(torch.randint(-100, 100, (n,), generator=generator))
    s = x.abs() / 448 * (1 + torch.rand(n, generator=generator) * 1000)
    x[::64], x[1::64], x[2::64] = 0.0, -0.0, x[2::64] * 2.0**-40
    s = s.clamp(min=torch.finfo(torch.float32).smallest_normal)
    up = torch.where(s < 8.6e-19, 2.0**64, torch.where(s > 1.2e18, 2.0**-64, 1.0))
    r, wide = 1.0 / (s * up), x * up
    q = (wide * r).clamp(-512, 512)
    rest = (wide.double() - q.double() * (s * up).double()).float()
    found = torch.where(wide == 0, wide, (q.double() + rest.double() * r.double()).float())
    assert torch.equal(found, x / s)
    assert torch.equal(found.signbit(), x.signbit())


# -- what is accepted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "dtype", "why"),
    [
        (ActivationSpec(INT8_ROW), torch.float64, "not float64"),
        (ActivationSpec(QuantSpec(INT8, (32,))), BF16, "per token or per tensor"),
        (ActivationSpec(QuantSpec(UINT8, (-1,), zero_point=True)), BF16, "not uint8"),
        (ActivationSpec(QuantSpec(INT8, (-1,), scale=BF16)), BF16, "float32 scales"),
        (ActivationSpec(INT8_ROW, rule="absmean"), BF16, "symmetric or absmax, not absmean"),
    ],
)
def test_a_refusal_is_a_sentence(act: ActivationSpec, dtype: torch.dtype, why: str) -> None:
    assert why in str(quantize.accepts(act, dtype))


@pytest.mark.parametrize("f", [INT8, INT4, E4M3, E5M2])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_what_is_accepted(f: Any, mode: str) -> None:
    for block in ((-1,), None):
        assert quantize.accepts(ActivationSpec(QuantSpec(f, block), mode), BF16) is True


def _case(n: int, k: int, act: QuantSpec = INT8_ROW, device: str = "cuda:sm_90", dtype: torch.dtype = BF16) -> Case:
    return Case(INT8_ROW, ActivationSpec(act), (n, k), dtype, device)


def test_the_row_of_each_size() -> None:
    assert select("linear", _case(100, 64)).name == "triton_int8"
    assert "multiple of 16, K is 72" in str(scaled_mm.accepts(INT8, _case(96, 72)))
    assert select("linear", _case(96, 72), any_layout=True).name == "triton_quantized_input"
    assert "overflow" in str(scaled_mm.accepts(INT8, _case(96, 1 << 18)))
    assert "plain scale" in str(scaled_mm.accepts(INT8, _case(96, 64, QuantSpec(INT8, (-1,), zero_point=True))))
    assert select("linear", _case(96, 64, device="cpu")).name != "triton_int8"
    assert select("linear", _case(96, 64, dtype=torch.float32)).name == "triton_int8"


def test_a_row_of_the_output_depends_on_its_row_alone() -> None:
    w = QT.from_float(torch.randn(64, 64), INT8_ROW).with_(act=ActivationSpec(INT8_ROW))
    assert explain(BF16, w, device="cuda:sm_90").row_independent is True


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_86", "cuda:sm_90", "cuda:sm_100", "hip:gfx942"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_tiles_fit_the_shared_memory(target: str, dtype: torch.dtype) -> None:
    for m in scaled_mm.tiles.BUCKETS:
        for n in (64, 4096, 16384):
            tile = scaled_mm.choose(INT8, target, m, n, dtype, scaled_mm.tiles.processors(target))
            assert tile is not None
            used = tile.stages * tile.bk * (tile.bm + tile.bn)
            used += tile.bm * tile.bn if tile.blocks else 0  # half a tile of results, 2 bytes each
            assert used <= scaled_mm.tiles.shared_memory(target), (target, m, tile)


# -- without a device --------------------------------------------------------------------------------------------------


def test_torch_quantizes_where_the_kernel_does_not_run() -> None:
    x = torch.randn(3, 64, dtype=BF16)
    act = ActivationSpec(INT8_ROW)
    found, wanted = quantize.quantized(x, act, None, None), encode_activation(x, act, None, None)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)
    weight = torch.rand(64, dtype=BF16)
    found = quantize.rms_norm_encode(x, weight, 1e-6, act)
    assert torch.equal(found.codes, encode_activation(F.rms_norm(x, (64,), weight, 1e-6), act, None, None).codes)


@needs_triton
@pytest.mark.exhaustive
def test_the_kernels_compile_without_spills() -> None:
    """The cases of the first use, for a H100. test_kernels_of_quantized_inputs compiles the kernels for one size."""
    from benchmarks.gpu import aot_compile
    from pennyweight.kernels.triton import quantize_kernel, scaled_mm_kernel

    names = ("product", "product_blocks")
    for check in self_test_inputs.cases():
        with (
            aot_compile.compiling("cuda:sm_90", quantize_kernel, ("quantize_rows",)) as first,
            aot_compile.compiling("cuda:sm_90", scaled_mm_kernel, names) as second,
        ):
            check.launches("cuda:sm_90")
        for compiled in (*first, *second):
            made = aot_compile.report(aot_compile.Job(check.name, lambda target: None), compiled)
            assert made.spills == 0, check.name
            assert made.shared <= 232_448
            assert ".ftz" not in compiled.asm["ptx"], "subnormal numbers would become zero"
            if compiled in second:
                assert made.matrix == {"QGMMA" if check.family == "float8" else "IGMMA"}, check.name
