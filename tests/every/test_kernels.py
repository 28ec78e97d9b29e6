"""Every row of the kernel table against the mathematics, over all that it accepts. Registered rows are enrolled."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pennyweight as pw
from pennyweight.core.formats import INT4, INT7, INT8, UINT3, UINT8, get_format
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.qparams import RULES
from pennyweight.core.spec import SPECS as NAMED
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import Kernel, explain, get_kernel, kernels, torch_int8
from pennyweight.kernels.activation import encode_activation, static_params
from pennyweight.kernels.cpu import conv_transposed, library
from pennyweight.kernels.table import case_of
from pennyweight.kernels.torch_int8 import int_mm_saturates
from tests.tensors import INT8_GROUPS, INT8_GROUPS_ASYMMETRIC, INT8_STATIC, INT8_TOKEN, UINT8_TOKEN
from tests.tensors import SPECS as TENSORS

SPECS = TENSORS | {name: NAMED[name] for name in ("q2_k", "q4_k", "q6_k", "iq4_xs")}

ACTIVATIONS = {
    "none": None,
    "int8_token": INT8_TOKEN,
    "int8_token_eps": ActivationSpec(QuantSpec(INT8, (-1,)), eps=1e-5),
    "int7_tensor": ActivationSpec(QuantSpec(INT7, None)),
    "int8_asymmetric": ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True)),
    "uint8_token": UINT8_TOKEN,
    "int8_groups": INT8_GROUPS,
    "int8_groups_asymmetric": INT8_GROUPS_ASYMMETRIC,
    "int8_static": INT8_STATIC,
    "int8_static_asymmetric": ActivationSpec(QuantSpec(INT8, None, zero_point=True), "static"),
}
# Scales of whole kernels, and inputs with one scale per sample, as planning gives convolutions.
CONVOLUTIONS = {
    "int8_channel": QuantSpec(INT8, (-1, -1, -1)), "int4_kernels": QuantSpec(INT4, (4, -1, -1), scale=torch.bfloat16),
    "uint3_zeros": QuantSpec(UINT3, (-1, -1, -1), zero_point=True), "int8_line": QuantSpec(INT8, (-1, -1)),
    "int5_tensor": QuantSpec(get_format("int5"), None),
}  # fmt: skip
TRANSPOSED = {
    "int8_channel": QuantSpec(INT8, (-1, 1, -1, -1)), "int4_taps": QuantSpec(INT4, (32, 1, 1, 1), scale=torch.bfloat16),
    "uint3_zeros": QuantSpec(UINT3, (-1, 1, -1, -1), zero_point=True), "int8_line": QuantSpec(INT8, (-1, 1, -1)),
    "int5_tensor": QuantSpec(get_format("int5"), None),
}  # fmt: skip
POSITIONS = {
    "int8_position": ActivationSpec(QuantSpec(INT8, (-1, 1, 1))),
    "uint8_position": ActivationSpec(QuantSpec(UINT8, (-1, 1, 1), zero_point=True)),
    "int8_line_position": ActivationSpec(QuantSpec(INT8, (-1, 1))),
    "int8_static": INT8_STATIC,
}
SAMPLES = {
    "int8_sample": ActivationSpec(QuantSpec(INT8, (-1, -1, -1))),
    "uint8_sample": ActivationSpec(QuantSpec(UINT8, (-1, -1, -1), zero_point=True)),
    "int8_line_sample": ActivationSpec(QuantSpec(INT8, (-1, -1))),
    "int8_static": INT8_STATIC,
}
MATRICES = [(32, 64), (17, 37), (48, 100), (16, 256), (1, 64), (2, 16)]  # [N, K]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [0, 1, 2, 15, 16, 17, 33]
ULP = {"float32": 2.0**-23, "bfloat16": 2.0**-7}
# A row that no case here reaches, and why. Nothing else is left out.
UNREACHED: dict[str, str] = {}


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])


def row_ids(op: str) -> list[Any]:
    return [pytest.param(k, id=k.name) for k in kernels(op)]


def make(spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype, act: ActivationSpec | None) -> QT:
    w = QT.from_float(torch.randn(*shape).to(dtype), spec.with_(layout="plain"), act=act)
    if act is not None and act.mode == "static":
        w = w.with_(act_scale=torch.tensor([0.03]))
        if act.spec.zero_point:
            w = w.with_(act_zero_point=torch.tensor([5], dtype=act.spec.zero_point_dtype))
    return w


def accepted(
    kernel: Kernel, shapes: list[tuple[int, ...]], acts: dict[str, Any], every: bool = True
) -> Iterator[tuple[str, QT]]:
    """Weights of every spec, activation, shape and dtype that the row accepts, in its layout. Otherwise one shape and
    dtype of each spec and activation, in turn."""
    if kernel.devices is not None and "cpu" not in kernel.devices:
        return
    more = {"convolution": CONVOLUTIONS, "transposed_convolution": TRANSPOSED}.get(kernel.op, {})
    specs = {name: spec for name, spec in (SPECS | more).items() if spec.layout in ("plain", kernel.layout)}
    cases = list(itertools.product(shapes, DTYPES))
    for turn, ((name, spec), (act_name, act)) in enumerate(itertools.product(specs.items(), acts.items())):
        start = 0 if every else 7 * turn % len(cases)  # 7: a step through all shapes and dtypes
        for shape, dtype in cases[start:] + cases[:start]:
            if spec.block is not None and len(spec.block) > len(shape):
                continue
            w = make(spec, shape, dtype, act)
            with pytest.MonkeyPatch.context() as patch:  # let small weights reach a row for large ones
                patch.setattr(torch_int8, "DIGIT_WEIGHTS", 0)
                patch.setattr(conv_transposed, "FEWEST", 1)
                refused = kernel.refuses(case_of(w, dtype), any_layout=True)
            if refused is None:
                yield f"{name} {act_name} {shape} {dtype}", w.to_layout(kernel.layout or "plain")
                if not every:
                    break


def seen(x: torch.Tensor, w: QT) -> torch.Tensor:
    """x as the weight's activation spec makes it, in float64."""
    if w.act is None:
        return x.double()
    params = None if w.act.mode == "dynamic" else static_params(x, w.act_scale, w.act_zero_point)
    return dequantize(quantize(x, w.act.spec, w.act.rule, w.act.eps, params), w.act.spec, x.shape, torch.float64)


def check(
    label: str,
    kernel: Kernel,
    got: torch.Tensor,
    op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    w: QT,
    bias: torch.Tensor | None,
) -> None:
    """|got - exact| <= 8 units of the declared arithmetic, of what the sums would be without cancellation."""
    xq, wq = seen(x, w), w.dequantize(torch.float64)
    exact, magnitude = op(xq, wq), op(xq.abs(), wq.abs())
    if kernel.layout == "cpu_float" and w.offset is not None:  # added to sums of its own, so what they cancel counts
        offset = w.offset.dequantize() if isinstance(w.offset, QT) else w.offset
        offset = offset.double().repeat_interleave(w.codes.shape[-1] // offset.shape[-1], -1)[..., : w.shape[-1]]
        magnitude = op(xq.abs(), (wq - offset).abs() + offset.abs())
    least = torch.finfo(x.dtype).smallest_normal * op(torch.ones_like(xq), wq.abs() + 1)  # CPUs flush subnormals
    if bias is not None:
        b = bias.double().reshape(-1, *(1,) * (exact.ndim - 2)) if w.ndim > 2 else bias.double()
        exact, magnitude = exact + b, magnitude + b.abs()
    assert got.dtype == x.dtype, label
    assert got.shape == exact.shape, label
    if kernel.tolerance == "fixed22":  # x is rounded at absmax / (127 * 2**14) / 2, just over 2**-22
        dims = tuple(range(1, xq.ndim)) if kernel.op == "convolution" else 1 if "convolution" in kernel.op else -1
        least = least + 2.0**-21 * op(xq.abs().amax(dims, keepdim=True).expand_as(xq), wq.abs())
    unit = max(ULP.get(kernel.tolerance, 0.0), torch.finfo(x.dtype).eps)
    error = (got.double() - exact).abs()
    assert bool((error <= 8 * unit * magnitude + least).all()), f"{label}: {(error / magnitude).max() / unit} units"


def inputs(k: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for m in ROWS:
        yield f"{m} rows", torch.randn(m, k).to(dtype)
    yield "1-d", torch.randn(k).to(dtype)
    yield "3-d", torch.randn(2, 3, k).to(dtype)
    yield "3-d, empty", torch.randn(2, 0, k).to(dtype)
    yield "4-d", torch.randn(2, 1, 3, k).to(dtype)
    yield "transposed", torch.randn(k, 5).to(dtype).t()
    yield "every other", torch.randn(6, 2 * k).to(dtype)[::2, ::2]
    yield "expanded", torch.randn(1, k).to(dtype).expand(4, k)
    yield "zero", torch.zeros(3, k, dtype=dtype)
    yield "constant", torch.full((3, k), 0.7, dtype=dtype)
    yield "subnormal", torch.full((2, k), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
    yield "large", (300 * torch.randn(3, k)).to(dtype)
    outlier = torch.randn(3, k)
    outlier[:, k // 2] = 1000
    yield "outlier", outlier.to(dtype)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


@EVERY
@pytest.mark.parametrize("kernel", row_ids("linear"))
def test_linear(kernel: Kernel, every: bool) -> None:
    few = {"zero", "17 rows", "3-d", "every other", "0 rows", "1-d"}
    for label, w in accepted(kernel, MATRICES, ACTIVATIONS, every):
        n, k = w.shape
        for i, (form, x) in enumerate(inputs(k, w.dtype)):
            if kernel.rank < 0 and form not in few:
                continue
            bias = torch.randn(n).to(w.dtype) if i % 2 else None
            before = x.clone()
            check(f"{label} {form}", kernel, kernel.run(x, w, bias), product, x, w, bias)
            assert torch.equal(x, before)


@pytest.mark.parametrize("kernel", row_ids("linear"))
def test_linear_of_another_dtype_than_the_weight(kernel: Kernel) -> None:
    for label, w in accepted(kernel, [(32, 64)], {"none": None, "int8_token": INT8_TOKEN}):
        for dtype in DTYPES:
            if kernel.refuses(case_of(w, dtype)) is None:
                x = torch.randn(3, 64).to(dtype)
                check(f"{label} x {dtype}", kernel, kernel.run(x, w, None), product, x, w, None)


@pytest.mark.parametrize("kernel", row_ids("linear"))
def test_linear_with_a_part_of_a_weight(kernel: Kernel) -> None:
    """Views of rows have parts with strides, or with an offset into storage."""
    if kernel.layout not in (None, "plain"):
        pytest.skip("its packed layout cannot be cut")
    for label, w in accepted(kernel, [(64, 64)], {"none": None, "int8_token": INT8_TOKEN}):
        if w.spec.block is not None and len(w.spec.block) > 1:
            continue  # rows share scales
        for piece in (w[3:20], w[::2], w[:, 32:48]):
            if kernel.refuses(case_of(piece, w.dtype)) is None:
                x = torch.randn(5, piece.shape[1]).to(w.dtype)
                check(label, kernel, kernel.run(x, piece, None), product, x, piece, None)


@pytest.mark.parametrize("kernel", row_ids("linear"))
def test_linear_gradients(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    for label, w in accepted(kernel, [(32, 64)], {"none": None, "int8_token": INT8_TOKEN}):
        w._bound[w.dtype] = (64, kernel.run, None)
        x = torch.randn(2, 5, 64).to(w.dtype).requires_grad_()
        bias = torch.randn(32).to(w.dtype).requires_grad_()
        y = F.linear(x, w, bias)
        up = torch.randn_like(y)
        y.backward(up)
        assert torch.equal(y.detach(), kernel.run(x.detach(), w, bias.detach())), label
        torch.testing.assert_close(x.grad, up @ w.dequantize(), msg=label)
        torch.testing.assert_close(bias.grad, up.flatten(0, 1).sum(0), msg=label)


@pytest.mark.parametrize("kernel", row_ids("bmm"))
def test_bmm(kernel: Kernel) -> None:
    for label, w in accepted(kernel, [(3, 16, 64), (1, 17, 37), (2, 1, 100)], {"none": None, "int8_token": INT8_TOKEN}):
        for m in (0, 1, 17):
            x = torch.randn(w.shape[0], m, w.shape[2]).to(w.dtype)
            check(label, kernel, kernel.run(x, w, None), lambda x, w: x @ w.transpose(1, 2), x, w, None)


def convolve(args: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.convolution.default(x, w, None, *args)


@EVERY
@pytest.mark.parametrize("kernel", row_ids("convolution"))
def test_convolution(kernel: Kernel, every: bool) -> None:
    acts = {"none": None, "int8": INT8_TOKEN, **SAMPLES}
    for label, w in accepted(kernel, [(16, 8, 3), (8, 4, 3, 3), (6, 1, 2, 3), (4, 2, 3, 1, 2)], acts, every):
        dims = w.ndim - 2
        for groups, stride in ((1, 1), (2, 2)):
            args = ([stride] * dims, [1] * dims, [1] * dims, False, [0] * dims, groups)
            x = torch.randn(2, w.shape[1] * groups, *[5, 6, 7][:dims]).to(w.dtype)
            if w.act is not None and w.act.spec.block is not None and len(w.act.spec.block) > dims + 1:
                continue  # a sample of another rank
            bias = torch.randn(w.shape[0]).to(w.dtype)
            check(label, kernel, kernel.run(x, w, bias, *args), partial(convolve, args), x, w, bias)


@EVERY
@pytest.mark.parametrize("kernel", row_ids("transposed_convolution"))
def test_transposed_convolution(kernel: Kernel, every: bool) -> None:
    acts = {"none": None, "int8": INT8_TOKEN, **POSITIONS}
    for label, w in accepted(kernel, [(40, 6, 3), (64, 4, 3, 2), (33, 1, 2, 2), (4, 2, 3, 1, 2)], acts, every):
        dims = w.ndim - 2
        for groups, stride, more in ((1, 1, 0), (1, 2, 1), (w.shape[0], 2, 0))[: 1 if kernel.rank < 0 else 3]:
            args = ([stride] * dims, [1] * dims, [1] * dims, True, [more] * dims, groups)
            x = torch.randn(2, w.shape[0], *[5, 6, 7][:dims]).to(w.dtype)
            if w.act is not None and w.act.spec.block is not None and len(w.act.spec.block) > dims + 1:
                continue  # positions of another rank
            bias = torch.randn(w.shape[1] * groups).to(w.dtype)
            check(label, kernel, kernel.run(x, w, bias, *args), partial(convolve, args), x, w, bias)


@pytest.mark.parametrize("kernel", row_ids("embedding"))
def test_embedding(kernel: Kernel) -> None:
    """A lookup computes nothing, so it is exact."""
    for label, w in accepted(kernel, [(50, 64), (13, 37), (32, 100)], {"none": None}):
        for index in (torch.randint(w.shape[0], (2, 3)), torch.tensor(4), torch.zeros(0, dtype=torch.int64)):
            assert torch.equal(kernel.run(index, w, None), w.dequantize()[index]), label


def test_every_row_is_reached_and_every_op_has_a_test() -> None:
    tests = {
        "linear": MATRICES, "bmm": [(3, 16, 64)], "convolution": [(8, 4, 3, 3)], "embedding": [(50, 64)],
        "transposed_convolution": [(64, 4, 3, 3)],
    }  # fmt: skip
    for kernel in kernels():
        assert kernel.op in tests, f"op {kernel.op} is new: write its conformance test here"
        if kernel.devices is not None and "cpu" not in kernel.devices:
            continue
        reached = next(accepted(kernel, tests[kernel.op], ACTIVATIONS | SAMPLES | POSITIONS), None)
        name = f"{kernel.op}/{kernel.name}"
        if name in UNREACHED:
            assert reached is None, f"{name} is reached: take it off the list"
        else:
            assert reached is not None, f"{name} accepts no case here: add a spec for it to tests/tensors.py"


def test_every_op_has_a_row_that_takes_anything() -> None:
    for op in {k.op for k in kernels()}:
        last = kernels(op)[-1]
        assert (last.rank, last.devices, last.layout) == (-1, None, None)


def test_refusals_are_sentences() -> None:
    for name, spec in SPECS.items():
        for act in ACTIVATIONS.values():
            w = make(spec, (48, 100), torch.float32, act)
            for kernel in kernels("linear"):
                reason = kernel.refuses(case_of(w), any_layout=True)
                assert reason is None or len(reason.split()) >= 3, (name, kernel.name, reason)


def test_explain_says_which_row_runs_and_why_better_ones_do_not() -> None:
    text = str(explain(torch.float32, QT.from_float(torch.randn(32, 100), SPECS["int8_row"])))
    assert "casting is faster for a weight of 3200 elements" in text
    assert "torch_int8_cast      rank  10  RUNS" in text
    assert "fast in bfloat16 only" in text
    assert "weight-only: the activation is not quantized" in text
    assert "works, but a better one runs" in text
    assert str(pw.explain(torch.bfloat16, QT.from_float(torch.randn(32, 100), SPECS["int8_row"]))).count("RUNS") == 1


# -- the lean quantizer of activations -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_get_the_bits_of_the_reference(act: str, dtype: torch.dtype) -> None:
    spec = ACTIVATIONS[act]
    if spec is None:
        return
    big = torch.finfo(dtype).max
    for scale in (1.0, 1e-3, 1e4, 1e-7, 1e-30, 1e30):
        for x in (torch.randn(5, 37), torch.randn(2, 3, 16), torch.randn(8), torch.zeros(2, 4), torch.ones(1, 1)):
            x = (x.double() * scale).clamp(-big, big).to(dtype)
            same_codes(x, spec)
    same_codes(torch.tensor([[big, -big, 1.0], [0.0, -0.0, 0.0], [-big, 0.0, 0.0]], dtype=dtype), spec)
    same_codes(torch.tensor([[float("inf"), 1.0, -2.0], [1.0, -float("inf"), 0.0]], dtype=dtype), spec)
    same_codes(torch.randn(0, 4).to(dtype), spec)


def same_codes(x: torch.Tensor, act: ActivationSpec) -> None:
    scale = zero = None
    if act.mode == "static":
        scale = torch.tensor([0.03])
        zero = torch.tensor([5], dtype=act.spec.zero_point_dtype) if act.spec.zero_point else None
    params = None if scale is None else static_params(x, scale, zero)
    reference = quantize(x, act.spec, act.rule, act.eps, params)
    got = encode_activation(x, act, scale, zero)
    for mine, theirs in zip(got, reference, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs), (x, mine, theirs)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_activations_follow_their_rule(rule: str) -> None:
    act = ActivationSpec(QuantSpec(INT8, (-1,)), rule=rule, eps=1e-6)
    try:
        quantize(torch.randn(2, 4), act.spec, rule, 1e-6)
    except ValueError:
        return  # a rule for specs of another kind
    same_codes(torch.randn(7, 33), act)


# -- a CPU on which torch._int_mm gives wrong sums -------------------------------------------------------------------

HELD_DOWN = """
import json, sys, torch
import torch.nn.functional as F
import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.kernels.table import case_of, select
from pennyweight.kernels.torch_int8 import int_mm_saturates
row = QuantSpec(INT8, (-1,))
w = pw.AffineQuantizedTensor.from_float(torch.full((16, 128), 2.0), row, act=ActivationSpec(row))
x = torch.full((3, 128), 1.5)
compiled = torch.compile(lambda x: F.linear(x, w), fullgraph=True, backend="aot_eager")(x)
kernel = select("linear", case_of(w))
print(json.dumps([int_mm_saturates(), kernel.name, str(pw.explain(x, w)), F.linear(x, w).tolist(), compiled.tolist()]))
"""


def test_a_product_that_saturates_is_refused() -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", HELD_DOWN], env=env, capture_output=True, text=True, check=True)
    saturates, name, text, eager, compiled = json.loads(run.stdout.splitlines()[-1])
    if not saturates:
        pytest.skip("oneDNN of this machine adds in 32 bits whatever it is held to")
    assert name == "torch_int8_float"
    assert "torch._int_mm saturates on this CPU" in text
    exact = torch.full((3, 16), 1.5 * 2.0 * 128)
    torch.testing.assert_close(torch.tensor(eager), exact, rtol=1e-2, atol=0)
    torch.testing.assert_close(torch.tensor(compiled), exact, rtol=1e-2, atol=0)


def test_the_row_that_replaces_it_gives_the_same_numbers() -> None:
    if int_mm_saturates():
        pytest.skip("torch._int_mm is wrong here")
    w = make(SPECS["int8_row"], (32, 96), torch.float32, INT8_TOKEN)
    x = torch.randn(17, 96)
    for name in ("torch_int_mm", "torch_int8_float"):
        assert torch.equal(
            get_kernel("linear", name).run(x, w, None), get_kernel("linear", "torch_int_mm").run(x, w, None)
        )


@pytest.mark.parametrize(("layout", "row"), [("plain", "torch_int_mm_digits"), ("cpu", "cpu_int")])
def test_digits_run_large_float32_weights_and_no_row_depends_on_its_neighbours(layout: str, row: str) -> None:
    if layout == "cpu" and library.available() is not True:
        pytest.skip("the native library was not built")
    torch.manual_seed(0)
    layer = torch.nn.Linear(1024, 1040)
    reference = layer.weight.detach().clone()
    pw.quantize_(layer, pw.Int8WeightOnlyConfig())
    layer.weight = torch.nn.Parameter(layer.weight.to_layout(layout), requires_grad=False)
    x = torch.randn(33, 1024)
    x[3, 7] = 1e4  # an outlier costs only its own token
    assert [name for name, _, verdict in explain(x, layer.weight).rows if verdict == "RUNS"] == [row]
    with torch.no_grad():
        whole = layer(x)
        assert all(torch.equal(whole[i : i + n], layer(x[i : i + n])) for i in range(33) for n in (1, 2) if i + n <= 33)
        exact = x.double() @ layer.weight.dequantize(torch.float64).t() + layer.bias.double()
    error = (whole - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 1e-5
    assert float(torch.cat([error[:3], error[4:]]).max()) < 1e-6
    wide = F.linear(x.double(), layer.weight, layer.bias.detach().double())
    assert float((wide - exact).norm() / exact.norm()) < 1e-12
    assert layer.weight.error(reference) > 40
    assert not layer(torch.full((1, 1024), torch.nan)).isfinite().any()
    assert not layer(torch.full((1, 1024), torch.inf)).isfinite().any()
