"""Each product of each recipe beside float64, to bounds that follow from the formats alone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pennyweight.algorithms.rewrites.hadamard import hadamard
from pennyweight.core import blocks, stochastic_rounding
from pennyweight.core.formats import E2M1, E2M3, E4M3, E5M2, INT4, INT8, NF4, TERNARY, UINT4, Format
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.spec import MXFP8, QuantSpec
from pennyweight.training import FORWARD, RECIPES, Gemm, Operand, Recipe, get_recipe, linear
from pennyweight.training.low_precision import gemm_table
from pennyweight.training.low_precision.quantize_operand import hadamard_rotated, quantize_operand
from tests import forked

NAMES = pytest.mark.parametrize("name", RECIPES)
# torch's own: dynamo makes an instance of every autograd.Function that it traces
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


# -- bounds ------------------------------------------------------------------------------------------------------------


def rounding(f: Format) -> tuple[float, float]:
    """(relative, absolute in code units): the nearest number is within the greater of the two."""
    if f.kind == "int":
        return 0.0, 0.5
    values = f.values or tuple(torch.arange(256, dtype=torch.uint8).view(f.code_dtype).float().tolist())
    positive = sorted({v for v in values if 0 < v < math.inf})
    mantissa = sum(1 <= v < 2 for v in positive)  # numbers in an octave
    return 0.5 / mantissa, positive[0] / 2


def error(x: Tensor, side: Any, seen: Tensor | None = None) -> Tensor:
    """The most by which an element of x [rows, contracted] may be off. Twice that of the nearest under chance."""
    if side is None:
        return torch.zeros_like(x)
    spec = side.spec
    relative, absolute = rounding(spec.format)
    wide = blocks.pad(x, spec.block)
    view = blocks.split(wide, blocks.counts(spec.block, x.shape))
    absmax = view.abs().amax(blocks.inner_axes(2), keepdim=True)
    reach = min(spec.format.hi, -spec.format.lo)
    # a power of two is at most twice the least scale under which nothing saturates; a scale of e4m3 is off by 1/16
    least = absmax / reach
    scale = least * (2 if side.rule in ("mx_rceil", "mx_floor") else 1)
    if isinstance(spec.scale, QuantSpec) and side.rule is None:
        scale = scale * (1 + 1 / 16) + wide.abs().max() / reach / 448 * 2.0**-9
        relative += 1 / 16  # what saturates under a scale that was rounded down
    if side.rule == "absmean":
        return (view.abs().mean(blocks.inner_axes(2), keepdim=True) / 2 + view.abs()).reshape(wide.shape)[
            : x.shape[0], : x.shape[1]
        ]
    off = torch.maximum(relative * view.abs(), (absolute * scale).expand_as(view)) * (2 if side.chance else 1)
    return off.reshape(wide.shape)[: x.shape[0], : x.shape[1]]


def bound(a: Tensor, b: Tensor, gemm: Gemm, seed: int) -> Tensor:
    """|a bᵀ as the recipe computes it - a bᵀ|, element by element: of sums of products, each of two that are off."""
    if gemm.hadamard:
        a, b = hadamard_rotated(a, gemm.hadamard, seed), hadamard_rotated(b, gemm.hadamard, seed)
    da, db = error(a, gemm.a), error(b, gemm.b)
    off = da @ b.abs().t() + a.abs() @ db.t() + da @ db.t()
    sums = (a.abs() + da) @ (b.abs() + db).t() * 2.0**-23 * (a.shape[1] + 4)  # float32 sums, scales and their result
    return off + sums + 1e-30


def problem(shape: tuple[int, ...] = (3, 17), k: int = 70, n: int = 33, dtype: torch.dtype = torch.float32) -> Any:
    x = torch.randn(*shape, k).to(dtype)
    x[..., 3] *= 20  # a channel as language models have them
    w, g = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(*shape, n).to(dtype) * 1e-3
    return x.requires_grad_(), w.requires_grad_(), torch.randn(n).to(dtype).requires_grad_(), g


def test_the_rounding_of_formats_is_what_is_claimed() -> None:
    assert rounding(E4M3) == (2.0**-4, 2.0**-10)
    assert rounding(E5M2) == (2.0**-3, 2.0**-17)
    assert rounding(E2M1) == (0.25, 0.25)
    assert rounding(INT8) == (0.0, 0.5)


@NAMES
@pytest.mark.parametrize("k", [70, 96])
def test_each_product_is_within_the_bound_of_its_formats(name: str, k: int) -> None:
    how = RECIPES[name]
    x, w, b, g = problem(k=k)
    y = linear(x, w, b, how)
    y.backward(g)
    rows, wide_w, wide_g = x.detach().double().flatten(0, 1), w.detach().double(), g.double().flatten(0, 1)
    exact = rows @ wide_w.t() + b.detach().double()
    off = (y.detach().double().flatten(0, 1) - exact).abs() - exact.abs() * 2.0**-23
    limit = bound(rows, wide_w, how.output, how.seed)
    assert (off <= limit).all()
    assert how.output.a is None or off.max() > 1e-3 * limit.max()  # something was rounded
    pairs = {
        "grad_input": (wide_g, wide_w.t(), how.grad_input, x.grad.flatten(0, 1), how.output.b),
        "grad_weight": (wide_g.t(), rows.t(), how.grad_weight, w.grad, how.output.a),
    }
    for what, (p, q, gemm, got, forward) in pairs.items():
        if gemm.b == FORWARD:  # as the output saw it: its error runs along the other axis
            limit = p.abs() @ error(q.t(), forward) + (p.abs() @ q.t().abs()) * 2.0**-16
        else:
            limit = bound(p, q, gemm, how.seed)
        off = (got.double() - p @ q.t()).abs()
        assert (off <= limit).all(), what
        assert not gemm.quantized or off.max() > 1e-3 * limit.max(), what
    torch.testing.assert_close(b.grad.double(), wide_g.sum(0), rtol=1e-5, atol=1e-7)


@NAMES
def test_high_precision_products_are_those_of_the_dtype(name: str) -> None:
    how = RECIPES[name]
    x, w, b, g = problem(dtype=torch.bfloat16)
    linear(x, w, b, how).backward(g)
    rows, flat = x.detach().flatten(0, 1), g.flatten(0, 1)
    if not how.grad_input.quantized:
        assert torch.equal(x.grad.flatten(0, 1), flat @ w)
    if not how.grad_weight.quantized:
        assert torch.equal(w.grad, flat.t() @ rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@NAMES
def test_other_dtypes_are_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    how = RECIPES[name]
    x, w, b, g = problem(dtype=dtype)
    y = linear(x, w, b, how)
    y.backward(g)
    twin = [t.detach().float().requires_grad_() for t in (x, w, b)]
    wanted = linear(*twin, how)
    wanted.backward(g.float())
    chanced = any(isinstance(s, Operand) and s.chance for s in (how.grad_input.a, how.grad_weight.a))
    eps = max(torch.finfo(dtype).eps, 1e-6)
    assert y.dtype is x.grad.dtype is w.grad.dtype is dtype
    # float64 keeps what float32 rounds on the way to a code: now and then the other one of two neighbours
    few = 0.02 if dtype is torch.float64 else 1.01
    pairs = [(y, wanted), (b.grad, twin[2].grad)]
    if not chanced:  # the random numbers follow the bits of the gradient, which are others
        pairs += [(x.grad, twin[0].grad), (w.grad, twin[1].grad)]
    for got, want in pairs:
        scale = want.detach().abs().max().item()
        atol = scale * max(eps, few * 0.05)
        torch.testing.assert_close(got.detach().float(), want.detach(), rtol=eps * 1.01, atol=atol)


# -- shapes, zeros, what is not finite ---------------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 3), (0,), (2, 0)])
def test_any_number_of_batch_axes(name: str, shape: tuple[int, ...]) -> None:
    x, w, b, g = problem(shape, k=48, n=16)
    y = linear(x, w, b, name)
    y.backward(g)
    assert y.shape == (*shape, 16)
    assert x.grad.shape == x.shape
    assert w.grad.isfinite().all()
    if not x.numel():
        assert not w.grad.any()
        assert not b.grad.any()


@NAMES
def test_zeros_give_zeros_and_never_nan(name: str) -> None:
    x, w, _, g = problem()
    with torch.no_grad():
        x[1], w[5], g[0] = 0, 0, 0
    y = linear(x, w, None, name)
    y.backward(g)
    for t in (y, x.grad, w.grad):
        assert t.isfinite().all()
    assert not y[1].any()
    assert not y[..., 5].any()
    assert not x.grad[0].any()
    x, w = torch.zeros(4, 32, requires_grad=True), torch.zeros(16, 32, requires_grad=True)
    y = linear(x, w, None, name)
    y.backward(torch.zeros(4, 16))
    assert not any(t.any() for t in (y, x.grad, w.grad))


@NAMES
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(name: str, value: float) -> None:
    x, w, _, g = problem((17,))
    clean = linear(x, w, None, name).detach()
    g[4, 7] = value
    linear(x, w, None, name).backward(g)
    assert not x.grad[4].isfinite().any()
    assert not w.grad[7].isfinite().any()
    with torch.no_grad():
        x[2, 3] = value
    y = linear(x, w, None, name)
    assert not y[2].isfinite().any()
    if RECIPES[name].output.a.spec.block == (-1,):
        assert torch.equal(y[5], clean[5])  # rows do not see each other
    w.grad = None
    y.backward(torch.ones_like(y))
    assert not w.grad[:, 3].isfinite().any()


def test_shapes_that_do_not_fit_and_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected weight \[N, K\] and input \[.., K\], got \[16, 32\] and \[2, 33\]"):
        linear(torch.ones(2, 33), torch.ones(16, 32))
    with pytest.raises(ValueError, match=r"must be floating point, got torch\.int64"):
        linear(torch.ones(2, 32, dtype=torch.int64), torch.ones(16, 32))
    with pytest.raises(
        ValueError, match=r"unknown training recipe 'fp8' \(did you mean .*\); known: tensorwise, rowwise"
    ):
        linear(torch.ones(2, 32), torch.ones(16, 32), None, "fp8")


# -- autograd, autocast, compile ---------------------------------------------------------------------------------------


def test_nothing_is_computed_or_kept_that_is_not_wanted() -> None:
    x, w, b, g = problem()
    y = linear(x.detach(), w.detach(), b, "rowwise")
    assert y.grad_fn.saved_tensors[0] is None
    y.backward(g)
    assert b.grad is not None
    y = linear(x, w, None, "tensorwise")  # one scale for all: the codes serve twice
    assert y.grad_fn.saved_tensors[0].dtype is torch.float8_e4m3fn
    y = linear(x, w, None, "bitnet")
    assert y.grad_fn.saved_tensors[0].dtype is torch.int8
    y = linear(x, w, None, "rowwise")
    assert y.grad_fn.saved_tensors[0].data_ptr() == x.data_ptr()


def test_the_output_is_no_view_and_can_be_written_to() -> None:
    for name in ("rowwise", "bitnet"):
        x, w, b, g = problem()
        y = linear(x, w, b, name)
        assert not y._is_view()
        y += x.detach().mean()
        y.backward(g)
        wanted = linear(x, twin := w.detach().requires_grad_(), b, name)
        wanted.backward(g)
        assert torch.equal(w.grad, twin.grad)


def test_codes_that_are_kept_give_the_gradient_of_codes_made_anew() -> None:
    """e5m2 for the input's second use: then it is quantized twice, and e4m3 the first time as ever."""
    x, w, _, g = problem()
    linear(x, w, None, "tensorwise").backward(g)
    flat, rows = g.flatten(0, 1), x.detach().flatten(0, 1)
    spec = QuantSpec(E4M3, None)
    e5m2 = QuantSpec(E5M2, None)
    a, b = (dequantize(quantize(t, s), s, t.shape) for t, s in ((flat.t(), e5m2), (rows.t(), spec)))
    torch.testing.assert_close(w.grad, a @ b.t(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "int8", "mxfp4"])
def test_autocast_casts_the_input_and_leaves_the_weight(name: str) -> None:
    x, w, b, g = problem()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, b, name)
    y.backward(g.to(torch.bfloat16))
    assert y.dtype is torch.bfloat16
    assert w.grad.dtype is x.grad.dtype is torch.float32
    half = x.detach().bfloat16().requires_grad_()
    twin = w.detach().clone().requires_grad_()
    wanted = linear(half, twin, b, name)
    wanted.backward(g.to(torch.bfloat16))
    assert torch.equal(y, wanted)
    assert torch.equal(w.grad, twin.grad)


@NAMES
def test_checkpointed_activations_give_the_same_gradients(name: str) -> None:
    x, w, b, g = problem()
    linear(F.gelu(x), w, b, name).backward(g)
    wanted = [t.grad.clone() for t in (x, w, b)]
    x.grad = w.grad = b.grad = None
    checkpoint(lambda v: linear(F.gelu(v), w, b, name), x, use_reentrant=False).backward(g)
    assert all(torch.equal(t.grad, v) for t, v in zip((x, w, b), wanted, strict=True))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@COMPILED
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("mxfp4", "inductor"), *((n, "aot_eager") for n in ("int8", "nvfp4")),
        *(pytest.param(n, "aot_eager", marks=pytest.mark.exhaustive) for n in ("tensorwise", "bitnet")),
    ],
)  # fmt: skip
def test_compiled_in_one_graph_to_the_same_bits(name: str, backend: str) -> None:
    x, w, b, g = problem()
    twin = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = linear(x, w, b, name)
    y.backward(g)
    compiled = torch.compile(lambda *t: linear(*t, name), fullgraph=True, backend=backend)(*twin)
    compiled.backward(g)
    assert torch.equal(y, compiled)
    assert torch.equal(x.grad, twin[0].grad)
    assert torch.equal(w.grad, twin[1].grad)
    torch.testing.assert_close(b.grad, twin[2].grad)


def test_second_derivatives_are_refused() -> None:
    x, w, _, _ = problem()
    (grad,) = torch.autograd.grad(linear(x, w, None, "rowwise").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


# -- the table of products ---------------------------------------------------------------------------------------------


def operands(a: str, b: str, k: int = 70) -> tuple[Any, Any]:
    x, w = torch.randn(17, k), torch.randn(33, k)
    sides = {
        "int8": Operand(QuantSpec(INT8, (-1,)), "absmax"), "ternary": Operand(QuantSpec(TERNARY, None), "absmean"),
        "e4m3": Operand(QuantSpec(E4M3, (-1,))), "e5m2": Operand(QuantSpec(E5M2, (-1,))),
        "tensor": Operand(QuantSpec(E4M3, None)), "mx": Operand(MXFP8),
    }  # fmt: skip
    return quantize_operand(x, sides[a], 0, 1, 0), quantize_operand(w, sides[b], 0, 2, 0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        tuple(pair.split())
        for pair in ("int8 int8", "int8 ternary", "e4m3 e4m3", "e5m2 e4m3", "tensor tensor", "e4m3 tensor")
    ],
)
@pytest.mark.parametrize("k", [70, 96, 1])
def test_every_row_gives_the_products_of_values(a: str, b: str, k: int) -> None:
    one, two = operands(a, b, k)
    wanted = gemm_table.by_value(one, two, torch.float64)
    limit = gemm_table.by_value(one._replace(parts=_positive(one)), two._replace(parts=_positive(two)), torch.float64)
    rows = {"by_code": gemm_table.by_code}
    if a == "int8":
        if gemm_table.select(gemm_table.case_of(one, two, torch.float32)).name == "torch._int_mm":
            rows["int_mm"] = gemm_table.int_mm
    elif torch.__version__ >= "2.12" or a == b == "tensor":  # torch 2.11 has no row scales on a CPU
        rows["scaled_mm"] = gemm_table.scaled_mm  # not chosen on a CPU; the same call as on a GPU, padding included
    for name, run in rows.items():
        y = run(one, two, torch.float32)
        assert y.shape == (17, 33)
        assert ((y.double() - wanted).abs() <= limit * 2.0**-23 * (k + 4)).all(), name


def _positive(q: Any) -> Any:
    codes = q.parts.codes
    return q.parts._replace(codes=codes.abs() if codes.dtype is torch.int8 else codes.float().abs().to(codes.dtype))


def test_rows_are_chosen_by_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    ints, floats, mx = operands("int8", "int8"), operands("e4m3", "tensor"), operands("mx", "mx")
    monkeypatch.setattr(gemm_table, "_saturates", lambda: False)
    chosen = [gemm_table.select(gemm_table.case_of(*pair, torch.bfloat16)).name for pair in (ints, floats, mx)]
    assert chosen == ["torch._int_mm", "float32 of codes", "float32 of values"]
    monkeypatch.setattr(gemm_table, "_saturates", lambda: True)
    said = dict(gemm_table.explain(gemm_table.case_of(*ints, torch.bfloat16)))
    assert "saturates on this CPU" in said["torch._int_mm"]
    assert said["float32 of codes"] == "RUNS"
    assert said["float32 of values"] == "works, but a better one runs"
    gpu = gemm_table.case_of(*floats, torch.bfloat16)
    for target, verdict in (("cuda:sm_80", "runs on cuda:sm_89+ only"), ("cuda:sm_90", "RUNS"), ("mps", "only")):
        gpu = gemm_table.ProductCase(gpu.a, gpu.b, gpu.shape, gpu.dtype, target)
        assert verdict in dict(gemm_table.explain(gpu))["torch._scaled_mm"]
    wide = gemm_table.ProductCase(gpu.a, gpu.b, gpu.shape, torch.float32, "cuda:sm_90")
    assert "gives bfloat16 results, the input is float32" in dict(gemm_table.explain(wide))["torch._scaled_mm"]
    both = gemm_table.ProductCase(QuantSpec(E5M2), QuantSpec(E5M2), (8, 8, 8), torch.bfloat16, "cuda:sm_90")
    assert dict(gemm_table.explain(both))["torch._scaled_mm"] == "one side must be e4m3"


@pytest.mark.parametrize("shape", [(1, 33), (17, 1), (1, 1)])
def test_single_rows_are_read_rightly(shape: tuple[int, int]) -> None:
    side = Operand(QuantSpec(INT8, (-1,)), "absmax")
    for k in (2, 16):
        a, b = torch.randn(k, shape[0]).t(), torch.randn(k, shape[1]).t()
        one, two = quantize_operand(a, side, 0, 1, 0), quantize_operand(b, side, 0, 2, 0)
        y = gemm_table.select(gemm_table.case_of(one, two, torch.float32)).run(one, two, torch.float32)
        torch.testing.assert_close(y, gemm_table.by_value(one, two, torch.float32))


def test_int8_sums_beyond_float32_are_exact() -> None:
    """4096 products of 127 · 127 plus one of 1: float32 would lose it."""
    a, b = torch.full((1, 4097), 127.0), torch.full((2, 4097), 127.0)
    b[1, 0] = 1.0
    side = Operand(QuantSpec(INT8, (-1,)), "absmax")
    one, two = quantize_operand(a, side, 0, 1, 0), quantize_operand(b, side, 0, 2, 0)
    row = gemm_table.select(gemm_table.case_of(one, two, torch.float64))
    if row.name != "torch._int_mm":
        pytest.skip("torch._int_mm saturates here")
    assert row.run(one, two, torch.float64).tolist() == [[4097 * 127.0 * 127, 4096 * 127.0 * 127 + 127]]


# -- Hadamard and chance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 32, 64])
def test_turning_both_sides_leaves_the_product(n: int) -> None:
    a, b = torch.randn(5, 70, dtype=torch.float64), torch.randn(7, 70, dtype=torch.float64)
    x, y = hadamard_rotated(a, n, 3), hadamard_rotated(b, n, 3)
    assert x.shape == (5, 70 + -70 % n)
    torch.testing.assert_close(x @ y.t(), a @ b.t(), rtol=1e-12, atol=1e-12)
    eye = hadamard_rotated(torch.eye(n, dtype=torch.float64), n, 3)
    assert torch.equal((eye * n**0.5).round().abs(), torch.ones(n, n, dtype=torch.float64))
    signs = (eye * n**0.5).round()[:, :1]
    assert torch.equal((eye * n**0.5).round() * signs, hadamard(n).double())
    assert not torch.equal(x, hadamard_rotated(a, n, 4))


SPECS = {
    "int8": QuantSpec(INT8, (-1,)), "int4": QuantSpec(INT4, (16,)), "e4m3": QuantSpec(E4M3, (-1,)),
    "e5m2": QuantSpec(E5M2, None), "e2m3": QuantSpec(E2M3, (-1,)), "e2m1": QuantSpec(E2M1, (16,)),
    "nf4": QuantSpec(NF4, (-1,)), "offset": QuantSpec(UINT4, (-1,), offset=torch.float32), "mx": MXFP8,
}  # fmt: skip


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour(spec: QuantSpec) -> None:
    x = torch.randn(2, 64)
    x[0, :8] *= 1e-3
    rule = "absmax" if spec.format.kind == "int" and not (spec.zero_point or spec.offset) else None
    rule = "mx_rceil" if spec == MXFP8 else rule
    times = 1000
    many = x.unsqueeze(0).expand(times, -1, -1)
    words = stochastic_rounding.random_bits(many.shape, stochastic_rounding.make_key(7))
    draws = torch.stack([
        dequantize(quantize(x, spec, rule, words=w), spec, x.shape, torch.float64) for w in words
    ])  # fmt: skip
    low, high = draws.amin(0), draws.amax(0)
    step = (high - low).clamp(min=0)
    for i, j in ((0, 20), (1, 5)):
        assert len(draws[:, i, j].unique()) <= 2  # the two around it
    # Bernstein's bound for the two-point distribution: six standard errors, and a rare one that was never drawn
    mean, p = draws.mean(0), ((x - low) / step.clamp(min=1e-30)).clamp(0, 1)
    error = 6 * step * (p * (1 - p) / times).sqrt() + step * 2.0**-15 + 1e-6 * x.abs() + 12 * step.max() / times
    assert ((mean - x).abs() <= error).all()
    exact = dequantize(quantize(x, spec, rule), spec, x.shape)
    again = dequantize(quantize(exact, spec, rule, words=words[0]), spec, x.shape)
    if spec.format.kind == "int" and rule:
        torch.testing.assert_close(again, exact, rtol=1e-3, atol=float(step.max()))


def test_learned_numbers_are_not_rounded_by_chance() -> None:
    from pennyweight.core.formats import learned

    with pytest.raises(ValueError, match="the numbers of this one are learned"):
        stochastic_rounding.encode_stochastic(torch.ones(4), learned(4), torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="fixed format in the plain layout"):
        Operand(QuantSpec(learned(4), (-1,)))


@pytest.mark.parametrize("name", ["mxfp4"])
def test_the_gradients_of_chance_are_right_in_the_mean(name: str) -> None:
    x, w, _, g = problem((32,), k=32, n=32)
    exact = {"x": g @ w.detach(), "w": g.t() @ x.detach()}
    times, total, square = 64, dict.fromkeys(exact, 0.0), dict.fromkeys(exact, 0.0)
    for seed in range(times):
        x.grad = w.grad = None
        linear(x, w, None, RECIPES[name].with_(seed=seed)).backward(g)
        for what, grad in (("x", x.grad), ("w", w.grad)):
            total[what] = total[what] + grad.double()
            square[what] = square[what] + grad.double() ** 2
    for what, want in exact.items():
        mean = total[what] / times
        error = ((square[what] / times - mean**2).clamp(min=0) / times).sqrt()
        off = (mean - want.double()) / error
        assert off.abs().max() < 6.5  # of 1024 elements, Student's t of 63 degrees
        assert off.mean().abs() < 5 / 32  # a bias common to all would show here
        assert 0.8 < off.std() < 1.2


def test_small_gradients_beside_a_large_one_are_not_lost() -> None:
    """One token's gradient is 1000 times that of the others, as where most of a text is learned already."""
    x, w, _, g = problem((64,), k=32, n=32)
    g[0] *= 1000

    def grad_weight(name: str, seed: int) -> Tensor:
        x.grad = w.grad = None
        linear(x, w, None, RECIPES[name].with_(seed=seed)).backward(g)
        return w.grad

    rest = g[1:].double().t() @ x[1:].detach().double()  # what the others add
    first = g[:1].double().t() @ x[:1].detach().double()
    kept = {}
    for name in ("int8", "int8_hadamard"):
        mean = sum(grad_weight(name, seed).double() for seed in range(256)) / 256 - first
        kept[name] = float((mean * rest).sum() / rest.square().sum())
    assert abs(kept["int8"]) < 0.5
    assert abs(kept["int8_hadamard"] - 1) < 0.1


def test_random_numbers_are_a_function_of_seed_and_gradient() -> None:
    x, w, _, g = problem()

    def grad(seed: int, g: Tensor) -> Tensor:
        w.grad = None
        linear(x, w, None, RECIPES["mxfp4"].with_(seed=seed)).backward(g)
        return w.grad

    first = grad(0, g)
    torch.rand(3)  # torch's generator has no part in it
    assert torch.equal(grad(0, g), first)
    assert not torch.equal(grad(1, g), first)
    other = g.clone()
    other[0, 0, 0] += 1e-4
    assert (grad(0, other) != first).double().mean() > 0.5


# -- recipes -----------------------------------------------------------------------------------------------------------


def test_recipes_are_checked_when_they_are_made() -> None:
    side = Operand(QuantSpec(E4M3, (-1,)))
    bad = {
        "quantizes nothing": lambda: Recipe("r", Gemm()),
        "cannot be FORWARD": lambda: Recipe("r", Gemm(side, FORWARD)),
        "a gradient has no value in the forward pass": lambda: Recipe("r", Gemm(side, side), Gemm(FORWARD, side)),
        "uses the forward operand": lambda: Recipe("r", Gemm(None, side), grad_weight=Gemm(None, FORWARD)),
        "0 or a power of two": lambda: Gemm(side, side, hadamard=24),
        "rotates both sides": lambda: Gemm(side, None, hadamard=32),
        "a 32-bit number": lambda: RECIPES["rowwise"].with_(seed=-1),
        "has more axes": lambda: Operand(QuantSpec(E4M3, (2, 2, 2))),
    }
    for text, make in bad.items():
        with pytest.raises(ValueError, match=text):
            make()


def test_formats_of_operands_can_be_others() -> None:
    how = get_recipe("rowwise").with_formats(grad_output=E5M2)
    assert (how.grad_input.a.spec.format, how.grad_weight.a.spec.format) == (E5M2, E5M2)
    assert how.output == RECIPES["rowwise"].output
    assert how.grad_weight.b == RECIPES["rowwise"].grad_weight.b
    assert how.name == "rowwise*"
    kept = get_recipe("rowwise_with_gw_hp").with_formats(input=E5M2)
    assert kept.grad_weight == Gemm()
    assert kept.output.a.spec.format is E5M2


def test_an_operand_is_its_key() -> None:
    for how in RECIPES.values():
        for gemm in (how.output, how.grad_input, how.grad_weight):
            for side in (gemm.a, gemm.b):
                if isinstance(side, Operand):
                    assert Operand.from_key(side.key) == side


def test_importing_training_brings_no_compiler() -> None:
    code = "import sys, pennyweight.training; sys.exit('torch._dynamo' in sys.modules)"
    root = Path(__file__).parents[2]
    forked.run(["-W", "error", "-c", code], cwd=root, check=True)
