"""Native convolutions beside the plain reference: values, memory formats, odd sizes, instruction sets, threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8, UINT4, UINT8, get_format
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.activation import static_params
from pennyweight.kernels.cpu import conv, library
from pennyweight.kernels.table import case_of, explain, get_kernel, select

pytestmark = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))

LAST, PLAIN = torch.channels_last, torch.contiguous_format
CHANNEL = QuantSpec(INT8, (-1, -1, -1))
SAMPLE = ActivationSpec(CHANNEL)
ASYMMETRIC = ActivationSpec(QuantSpec(INT8, (-1, -1, -1), zero_point=True))
UNSIGNED = ActivationSpec(QuantSpec(UINT8, (-1, -1, -1), zero_point=True))
STATIC = ActivationSpec(QuantSpec(INT8, None), "static")
STATIC_ZERO = ActivationSpec(QuantSpec(UINT8, None, zero_point=True), "static")
ACTS = {"sample": SAMPLE, "asymmetric": ASYMMETRIC, "unsigned": UNSIGNED, "static": STATIC, "static_zero": STATIC_ZERO}
# weight [o, c / groups, kh, kw]; input n, h, w; stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "1x1": ((64, 64, 1, 1), (3, 7, 7), 1, 0, 1, 1),
    "1x1 stride 2": ((33, 20, 1, 1), (2, 9, 8), 2, 0, 1, 1),
    "3x3": ((16, 16, 3, 3), (1, 8, 8), 1, 1, 1, 1),
    "3x3 many channels": ((130, 100, 3, 3), (2, 9, 9), 1, 1, 1, 1),
    "3x3 stride 2": ((17, 5, 3, 3), (2, 13, 10), 2, 1, 1, 1),
    "5x5 dilated": ((33, 5, 5, 5), (2, 13, 9), 1, 2, 2, 1),
    "7x7 stride 2": ((17, 3, 7, 7), (2, 29, 31), 2, 3, 1, 1),
    "kernel, stride, padding, dilation of two sizes": ((8, 4, 2, 3), (1, 6, 7), (1, 2), (1, 2), (2, 1), 1),
    "padding without input": ((5, 3, 3, 3), (1, 1, 1), 1, 2, 1, 1),
    "two groups": ((64, 16, 3, 3), (2, 10, 11), 2, 1, 1, 2),
    "groups within a tile": ((30, 5, 3, 3), (2, 10, 11), 1, 1, 1, 3),
    "groups of two channels": ((20, 2, 3, 3), (2, 9, 9), 1, 1, 1, 10),
    "depthwise": ((35, 1, 3, 3), (2, 15, 30), 1, 1, 1, 35),
    "depthwise stride 2": ((32, 1, 3, 3), (2, 21, 35), 2, 1, 1, 32),
    "depthwise 5x5": ((16, 1, 5, 5), (1, 12, 23), 1, 2, 1, 16),
    "depthwise 5x5 stride 2": ((16, 1, 5, 5), (1, 12, 43), 2, 2, 1, 16),
    "depthwise dilated": ((16, 1, 3, 3), (1, 12, 13), 1, 2, 2, 16),
    "depthwise with a multiplier": ((48, 1, 3, 3), (2, 8, 9), 1, 1, 1, 16),
    "one input channel": ((40, 1, 5, 5), (2, 12, 12), 1, (2, 1), 1, 1),
}


@pytest.fixture
def each_isa() -> Iterator[list[str]]:
    """Instruction sets of this machine; the best is in use again afterwards."""
    yield library.isas()
    library.use_isa("")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def made(
    name: str, spec: QuantSpec, act: ActivationSpec, dtype: torch.dtype, form: torch.memory_format
) -> tuple[Any, ...]:
    """Weight in layout "cpu_conv", input, bias, and the arguments of aten.convolution after them."""
    shape, (n, h, w), stride, padding, dilation, groups = CASES[name]
    weight = QT.from_float((torch.randn(shape) / 8).to(dtype), spec, act=act)
    if act.mode == "static":
        weight = weight.with_(act_scale=torch.tensor([0.03]))
        if act.spec.zero_point:
            weight = weight.with_(act_zero_point=torch.tensor([117], dtype=act.spec.zero_point_dtype))
    x = torch.randn(n, shape[1] * groups, h, w).to(dtype).contiguous(memory_format=form)
    bias = torch.randn(shape[0]).to(dtype)
    return weight.to_layout("cpu_conv"), x, bias, [pair(stride), pair(padding), pair(dilation), False, [0, 0], groups]


def seen(x: torch.Tensor, w: QT) -> torch.Tensor:
    """x as the weight's activation makes it, in float64."""
    assert w.act is not None
    params = None if w.act.mode == "dynamic" else static_params(x, w.act_scale, w.act_zero_point)
    return dequantize(quantize(x, w.act.spec, w.act.rule, w.act.eps, params), w.act.spec, x.shape, torch.float64)


def check(w: QT, x: torch.Tensor, bias: torch.Tensor, rest: list[Any], got: torch.Tensor) -> None:
    """Sums are exact, so only the scale, the bias and the output dtype round."""
    wq, xq = w.dequantize(torch.float64), seen(x, w)
    exact = torch.ops.aten.convolution.default(xq, wq, bias.double(), *rest)
    most = torch.ops.aten.convolution.default(xq.abs(), wq.abs(), bias.double().abs(), *rest)
    unit = max(torch.finfo(x.dtype).eps, 2.0**-22)
    assert got.dtype == x.dtype
    assert got.shape == exact.shape
    assert bool(((got.double() - exact).abs() <= unit * (2 * exact.abs() + most)).all())
    assert bool(((got.double() - exact).abs() <= 2 * unit * exact.abs() + 2.0**-20 * most).all())


def run(w: QT, x: torch.Tensor, bias: torch.Tensor | None, rest: list[Any]) -> torch.Tensor:
    kernel = select("convolution", case_of(w, x.dtype))
    assert kernel.name == "cpu_conv", explain(x, w, "convolution")
    return kernel.run(x, w, bias, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_memory_format(name: str, act: str, dtype: torch.dtype) -> None:
    for form in (PLAIN, LAST):
        w, x, bias, rest = made(name, CHANNEL, ACTS[act], dtype, form)
        before = x.clone()
        y = run(w, x, bias, rest)
        check(w, x, bias, rest, y)
        like = torch.ops.aten.convolution.default(x, w.dequantize(), bias, *rest)
        assert y.stride() == like.stride()
        assert torch.equal(x, before)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", ["3x3", "7x7 stride 2", "two groups", "depthwise"])
def test_every_width_of_codes(name: str, bits: int) -> None:
    for spec in (
        QuantSpec(get_format(f"int{bits}"), (-1, -1, -1)),
        QuantSpec(get_format(f"uint{bits}"), (-1, -1, -1), scale=torch.float16, zero_point=True),
        QuantSpec(get_format(f"int{bits}"), None, scale=torch.bfloat16),
    ):
        for act in (SAMPLE, STATIC_ZERO):
            w, x, bias, rest = made(name, spec, act, torch.float32, LAST)
            check(w, x, bias, rest, run(w, x, bias, rest))


@pytest.mark.parametrize("zero", [False, True])
def test_scales_of_groups_of_channels(zero: bool) -> None:
    for name, channels in (("1x1", 32), ("3x3", 4), ("3x3", 8), ("two groups", 8), ("3x3 many channels", 20)):
        for act in (SAMPLE, UNSIGNED):
            spec = QuantSpec(UINT4 if zero else INT4, (channels, -1, -1), scale=torch.bfloat16, zero_point=zero)
            w, x, bias, rest = made(name, spec, act, torch.float32, PLAIN)
            check(w, x, bias, rest, run(w, x, bias, rest))


@pytest.mark.parametrize("name", CASES)
def test_samples_threads_and_instruction_sets_give_the_same_bits(
    name: str, each_isa: list[str], two_threads: None
) -> None:
    for act in (SAMPLE, STATIC_ZERO):
        w, x, bias, rest = made(name, QuantSpec(INT8, (-1, -1, -1)), act, torch.float32, LAST)
        torch.set_num_threads(1)
        y = run(w, x, bias, rest)
        for isa in each_isa:
            library.use_isa(isa)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(run(w, x, bias, rest), y), (isa, threads)
                assert torch.equal(run(w, x.contiguous(), bias, rest), y), (isa, threads)
                alone = torch.cat([run(w, sample, bias, rest) for sample in x.split(1)])
                assert torch.equal(alone, y), (isa, threads)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0][1] > 1])
def test_weights_alone(name: str, each_isa: list[str], two_threads: None) -> None:
    """A float input is rounded to 2**-22 of its sample's largest magnitude; everything else is float32."""
    shape, (n, h, w), stride, padding, dilation, groups = CASES[name]
    rest = [pair(stride), pair(padding), pair(dilation), False, [0, 0], groups]
    for spec in (
        CHANNEL,
        QuantSpec(UINT4, (-1, -1, -1), zero_point=True),
        QuantSpec(INT4, (4, -1, -1), scale=torch.bfloat16),
    ):
        if shape[1] % 4 and spec.block == (4, -1, -1):
            continue
        weight = QT.from_float(torch.randn(shape) / 8, spec).to_layout("cpu_conv")
        x, bias = torch.randn(n, shape[1] * groups, h, w), torch.randn(shape[0])
        kernel = select("convolution", case_of(weight))
        assert kernel.name == "cpu_conv_float"
        torch.set_num_threads(1)
        y = kernel.run(x, weight, bias, *rest)
        wq = weight.dequantize(torch.float64)
        exact = torch.ops.aten.convolution.default(x.double(), wq, bias.double(), *rest)
        largest = x.abs().amax((1, 2, 3), keepdim=True).expand_as(x).double()
        most = torch.ops.aten.convolution.default(largest, wq.abs(), bias.double().abs(), *rest)
        assert bool(((y.double() - exact).abs() <= 2.0**-22 * most).all())
        assert bool((kernel.run(torch.zeros_like(x), weight, None, *rest) == 0).all())
        assert kernel.run(torch.full_like(x, torch.inf), weight, None, *rest).isnan().all()
        for isa in each_isa:
            library.use_isa(isa)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                last = x.contiguous(memory_format=LAST)
                assert torch.equal(kernel.run(last, weight, bias, *rest), y), (isa, threads)


def test_many_units_of_work(two_threads: None) -> None:
    torch.set_num_threads(2)
    for n in (1, 3, 9):  # all threads share a sample, or each has its own
        x = torch.randn(n, 24, 40, 37)
        w = QT.from_float(torch.randn(80, 24, 3, 3) / 8, CHANNEL, act=ASYMMETRIC).to_layout("cpu_conv")
        rest = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]
        check(w, x, torch.zeros(80), rest, run(w, x, torch.zeros(80), rest))


def test_one_dimension() -> None:
    act = ActivationSpec(QuantSpec(INT8, (-1, -1)))
    for form in ("contiguous", "transposed"):
        for stride, padding, dilation, groups in ((1, 1, 1, 1), (2, 3, 2, 2), (1, 0, 1, 12)):
            x = torch.randn(3, 12, 50) if form == "contiguous" else torch.randn(3, 50, 12).transpose(1, 2)
            w = QT.from_float(torch.randn(24, 12 // groups, 5), QuantSpec(INT8, (-1, -1)), act=act).to_layout(
                "cpu_conv"
            )
            bias, rest = torch.randn(24), [[stride], [padding], [dilation], False, [0], groups]
            y = run(w, x, bias, rest)
            check(w, x, bias, rest, y)
            assert y.stride() == torch.conv1d(x, w.dequantize(), bias, stride, padding, dilation, groups).stride()


def test_extreme_inputs() -> None:
    w, x, bias, rest = made("3x3", CHANNEL, SAMPLE, torch.float32, PLAIN)
    for value in (0.0, 1e-40, 1e30, -3.0):
        y = run(w, torch.full_like(x, value), bias, rest)
        assert y.isfinite().all()
        if abs(value) < 1:
            torch.testing.assert_close(y, bias.view(-1, 1, 1).expand_as(y))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for act in (SAMPLE, ASYMMETRIC, STATIC):
            w, x, bias, rest = made("3x3", CHANNEL, act, torch.float32, LAST)
            two = torch.cat([x, x])
            two[0, 3, 2, 2] = bad
            y = run(w, two, bias, rest)
            assert y[0].isnan().all()  # the sample, and no other
            assert torch.equal(y[1:], run(w, x, bias, rest))


def test_errors_and_empty_inputs_are_those_of_torch() -> None:
    conv2d = nn.Conv2d(3, 8, 3)
    pw.quantize_(conv2d, pw.Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda module, name: True)
    assert conv2d.weight.spec.layout == "cpu_conv"
    assert conv2d(torch.randn(0, 3, 8, 8)).shape == (0, 8, 6, 6)
    assert conv2d(torch.randn(3, 8, 8)).shape == (8, 6, 6)
    for shape in ((1, 4, 8, 8), (1, 3, 2, 8), (1, 3, 0, 8), (8, 8)):
        with pytest.raises(RuntimeError):
            conv2d(torch.randn(shape))
        with pytest.raises(RuntimeError):
            F.conv2d(torch.randn(shape), conv2d.weight.dequantize())
    with pytest.raises(RuntimeError):
        F.conv2d(torch.randn(1, 3, 8, 8), conv2d.weight, torch.randn(9))
    with pytest.raises(RuntimeError):
        F.conv2d(torch.randn(1, 3, 8, 8), conv2d.weight, None, 0)


def test_f_conv_with_every_form_of_its_arguments() -> None:
    w, x, bias, _ = made("two groups", CHANNEL, SAMPLE, torch.float32, PLAIN)
    want = run(w, x, bias, [[2, 2], [1, 1], [1, 1], False, [0, 0], 2])
    pw.reset_fallbacks()
    with torch.no_grad():
        assert torch.equal(F.conv2d(x, w, bias, 2, 1, 1, 2), want)
        assert torch.equal(F.conv2d(x, w, bias, (2, 2), (1,), groups=2), want)
        assert torch.equal(F.conv2d(input=x, weight=w, bias=bias, stride=2, padding=1, groups=2), want)
        same = run(w, x, None, [[1, 1], [1, 1], [1, 1], False, [0, 0], 2])
        assert torch.equal(F.conv2d(x, w, padding="same", groups=2), same)
        assert torch.equal(F.conv2d(x, w, padding="valid", groups=2), same[..., 1:-1, 1:-1])
    with torch.autocast("cpu", torch.bfloat16):
        assert F.conv2d(x, w, bias, 2, 1, 1, 2).dtype is torch.bfloat16
    assert not pw.fallbacks()


def model() -> nn.Module:
    layers = [
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 1),
    ]
    quantized = nn.Sequential(*layers).eval()
    pw.quantize_(quantized, pw.Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda m, n: isinstance(m, nn.Conv2d))
    return quantized


@pytest.mark.parametrize("form", [PLAIN, LAST])
def test_compiled(form: torch.memory_format) -> None:
    net = model()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for n in (2, 5):
            x = torch.randn(n, 3, 16, 16).contiguous(memory_format=form)
            y, z = net(x), compiled(x)
            assert torch.equal(y, z)
            assert y.stride() == z.stride()


def test_gradients_use_the_dequantized_weight() -> None:
    net, x = model(), torch.randn(2, 3, 16, 16, requires_grad=True)
    y = net(x)
    up = torch.randn_like(y)
    y.backward(up)
    masks = [net[:2](x) > 0, net[:4](x) > 0]
    grad = up
    for i in (4, 2, 0):
        layer = net[i]
        size = x.shape if i == 0 else net[:i](x).shape
        grad = torch.nn.grad.conv2d_input(
            size, layer.weight.dequantize(), grad, layer.stride, layer.padding, layer.dilation, layer.groups
        )
        if i:
            grad = grad * masks[i // 2 - 1]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, grad)


def test_what_is_refused_says_why() -> None:
    def reason(
        spec: QuantSpec, shape: tuple[int, ...], act: ActivationSpec | None = SAMPLE, row: str = "cpu_conv"
    ) -> str:
        w = QT.from_float(torch.randn(shape), spec, act=act)
        return {name: verdict for name, _, verdict in explain(torch.float32, w, "convolution").rows}[row]

    assert "weight-only" in reason(CHANNEL, (8, 4, 3, 3), None)
    assert "input is quantized" in reason(CHANNEL, (8, 4, 3, 3), SAMPLE, row="cpu_conv_float")
    assert "one input channel" in reason(CHANNEL, (8, 1, 3, 3), None, row="cpu_conv_float")
    assert "scales for whole kernels" in reason(QuantSpec(INT8, (-1,)), (8, 4, 3, 3))
    assert "multiple of 4, not of 2" in reason(QuantSpec(INT8, (2, -1, -1)), (8, 4, 3, 3))
    assert "one activation scale per sample" in reason(CHANNEL, (8, 4, 3, 3), ActivationSpec(QuantSpec(INT8, (-1,))))
    assert "one or two dimensions" in reason(QuantSpec(INT8, (-1, -1, -1, -1)), (8, 4, 3, 3, 3))
    assert "32 bits" in reason(CHANNEL, (2, 4096, 3, 3))
    assert "integer codes" in reason(QuantSpec(get_format("e4m3"), (-1, -1, -1)), (8, 4, 3, 3))


def test_whole_kernels_are_packed() -> None:
    for bits in (3, 4):
        spec = QuantSpec(get_format(f"int{bits}"), (-1, -1, -1))
        w = QT.from_float(torch.randn(64, 64, 3, 3), spec, act=SAMPLE).to_layout("cpu_conv")
        assert w.nbytes == 64 * 64 * 9 * bits // 8 + 64 * 4
        assert conv.LAYOUT.nbytes(spec, (64, 64, 3, 3)) == w.nbytes


def test_pickled_and_saved(tmp_path: Any) -> None:
    net = model()
    x = torch.randn(1, 3, 16, 16)
    torch.save(net.state_dict(), tmp_path / "model.pt")
    again = model()
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert again[0].weight.spec.layout == "cpu_conv"
    assert torch.equal(again(x), net(x))


def test_a_part_that_lost_its_memory_is_noticed() -> None:
    w, x, bias, rest = made("3x3", CHANNEL, SAMPLE, torch.float32, PLAIN)
    bound = conv.bind(case_of(w))
    operand = bound.operand(w.parts)
    stride, padding, dilation, _, _, groups = rest
    assert bound.run(x, operand, bias, stride, padding, dilation, groups) is not None
    w.parts.codes.untyped_storage().resize_(0)
    w.parts.codes.set_()
    with pytest.raises(ValueError, match="convolution: a stored part"):
        bound.run(x, operand, bias, stride, padding, dilation, groups)
    assert get_kernel("convolution", "cpu_conv").row_independent
