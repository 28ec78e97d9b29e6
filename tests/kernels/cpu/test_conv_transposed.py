"""Transposed convolutions with quantized weights: every geometry gives torch's result on the dequantized weight."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import pennyweight as pw
from pennyweight.core.formats import INT8, get_format
from pennyweight.core.numerics import dequantize, quantize, sqnr
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import explain, get_kernel, table
from pennyweight.kernels.activation import static_params
from pennyweight.kernels.cpu import conv_transposed, library
from pennyweight.kernels.graph_weight import flatten, key_of
from pennyweight.kernels.repack import prepare
from pennyweight.kernels.table import case_of, select

pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

OP, LAST, PLAIN = "transposed_convolution", torch.channels_last, torch.contiguous_format
CHANNEL, POSITION = QuantSpec(INT8, (-1, 1, -1, -1)), ActivationSpec(QuantSpec(INT8, (-1, 1, 1)))
UINT8 = ActivationSpec(QuantSpec(get_format("uint8"), (-1, 1, 1), zero_point=True))
STATIC = ActivationSpec(QuantSpec(INT8, None), "static")
CONFIGS = ["int8", "int8-dynamic", "int4", pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.03)]
# weight [I, O, *taps], input [B, I, *positions], arguments of nn.functional.conv_transpose
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((7, 5, 1, 1), (2, 7, 3, 4), {}),
    "2x2 stride 2": ((40, 9, 2, 2), (2, 40, 5, 3), {"stride": 2}),
    "2x2 stride 2 cut": ((40, 9, 2, 2), (2, 40, 5, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "4x4 stride 2": ((33, 17, 4, 4), (1, 33, 5, 6), {"stride": 2, "padding": 1}),
    "3x3": ((16, 24, 3, 3), (3, 16, 7, 5), {"padding": 1}),
    "3x5 uneven": ((8, 3, 3, 5), (2, 8, 4, 7), {"stride": (3, 1), "padding": (0, 2), "output_padding": (2, 0)}),
    "3x3 dilated": ((8, 6, 3, 3), (2, 8, 5, 5), {"stride": 2, "dilation": 3, "padding": 2, "output_padding": 2}),
    "1x1 stride 3": ((5, 4, 1, 1), (2, 5, 3, 3), {"stride": 3, "output_padding": 1}),
    "all cut": ((8, 6, 5, 5), (2, 8, 2, 2), {"padding": 2}),
    "one position": ((64, 32, 4, 4), (2, 64, 1, 1), {}),
    "no batch": ((8, 6, 3, 3), (0, 8, 4, 4), {}),
}
LINES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "line stride 2": ((33, 7, 4), (2, 33, 9), {"stride": 2, "padding": 1}),
    "line dilated": ((8, 6, 5), (3, 8, 7), {"stride": 3, "padding": 2, "dilation": 2, "output_padding": 2}),
    "line apart": ((8, 6, 4), (3, 8, 7), {"stride": 4}),
}


@pytest.fixture(autouse=True)
def few_channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small weights run as large ones do."""
    monkeypatch.setattr(conv_transposed, "FEWEST", 1)
    table._select.cache_clear()
    yield
    monkeypatch.undo()
    table._select.cache_clear()


def made(
    name: str, spec: QuantSpec = CHANNEL, act: ActivationSpec | None = None, dtype: torch.dtype = torch.float32
) -> tuple[QT, torch.Tensor, torch.Tensor, dict[str, Any]]:
    shape, size, kwargs = (CASES | LINES)[name]
    torch.manual_seed(len(name))
    if len(shape) == 3:
        spec = spec if spec.block is None else spec.with_(block=spec.block[:-1])
        block = None if act is None else act.spec.block
        act = act if act is None or block is None else ActivationSpec(act.spec.with_(block=block[:-1]))
    w = QT.from_float(torch.randn(shape).to(dtype), spec, act=act)
    if act is not None and act.mode == "static":
        w = w.with_(act_scale=torch.tensor([0.03]))
    w = prepare(w, (OP,))
    kernel = select(OP, case_of(w, dtype))
    assert kernel.name == "cpu_int_columns", explain(dtype, w, OP)
    return w, torch.randn(size).to(dtype), torch.randn(shape[1]).to(dtype), kwargs


def transposed(x: torch.Tensor, w: Any, bias: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    return (F.conv_transpose1d if w.ndim == 3 else F.conv_transpose2d)(x, w, bias, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", [None, POSITION, UINT8, STATIC], ids=["weights", "int8", "uint8", "static"])
@pytest.mark.parametrize("name", [*CASES, *LINES])
def test_values_and_memory_format(name: str, act: ActivationSpec | None, dtype: torch.dtype) -> None:
    w, x, bias, kwargs = made(name, CHANNEL, act, dtype)
    seen = x.double()
    if act is not None:
        params = static_params(x, w.act_scale, None) if act.mode == "static" else None
        codes = quantize(x, w.act.spec, w.act.rule, w.act.eps, params)
        seen = dequantize(codes, w.act.spec, x.shape, torch.float64)
    plain = w.dequantize(torch.float64)
    for b in (None, bias):
        exact = transposed(seen, plain, None if b is None else b.double(), kwargs)
        most = transposed(seen.abs(), plain.abs(), None if b is None else b.double().abs(), kwargs)
        for form in (PLAIN, LAST) if w.ndim == 4 else (PLAIN,):
            given = x.contiguous(memory_format=form)
            pw.reset_fallbacks()
            with pw.kernels.strict():
                y = transposed(given, w, b, kwargs)
            assert not pw.fallbacks()
            assert (y.dtype, y.shape) == (dtype, exact.shape)
            assert y.stride() == transposed(given, w.dequantize(dtype), b, kwargs).stride() or y.numel() == 0
            unit = 4 * torch.finfo(dtype).eps if dtype is not torch.float32 else 2.0**-18
            assert bool(((y.double() - exact).abs() <= unit * most + 1e-30).all())


@pytest.mark.parametrize("form", [PLAIN, LAST])
@pytest.mark.parametrize("name", [name for name in [*CASES, *LINES] if name != "no batch"])
def test_a_graph_has_it_as_one_op(name: str, form: torch.memory_format) -> None:
    w, x, bias, kwargs = made(name)
    if w.ndim == 4:
        x = x.contiguous(memory_format=form)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: transposed(x, w, bias, kwargs), fullgraph=True, backend=aot_autograd(fw_compiler=keep)
    )
    with torch.no_grad():
        y, eager = compiled(x), transposed(x, w, bias, kwargs)
    assert torch.equal(y, eager)
    assert y.stride() == eager.stride()
    (graph,) = graphs
    (node,) = (n for n in graph.graph.nodes if n.op == "call_function")
    assert node.target is torch.ops.pennyweight.transposed_convolution.default
    torch.library.opcheck(
        node.target,
        (x, flatten(w)[0], bias, *arguments(w.ndim - 2, kwargs), key_of(w)),
        test_utils=("test_schema", "test_faketensor"),
    )


def arguments(n: int, kwargs: dict[str, Any]) -> Iterator[list[int]]:
    for key, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
        value = kwargs.get(key, default)
        yield [value] * n if isinstance(value, int) else list(value)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_of_codes_and_every_block(bits: int) -> None:
    blocks = ((-1, 1, -1, -1), (-1, 1, 1, 1), (32, 1, 1, 1), None)
    specs = [QuantSpec(get_format(f"int{bits}"), block) for block in blocks]
    specs.append(QuantSpec(get_format(f"uint{bits}"), (-1, 1, -1, -1), zero_point=True))
    specs.append(QuantSpec(get_format(f"uint{bits}"), (32, 1, 1, 1), scale=torch.float32, offset=torch.float32))
    for spec in specs:
        w, x, bias, kwargs = made("4x4 stride 2", spec)
        y = transposed(x, w, bias, kwargs)
        torch.testing.assert_close(y, transposed(x, w.dequantize(), bias, kwargs), atol=1e-4, rtol=1e-4)
        assert torch.equal(w.to_layout("plain").to_layout(w.spec.layout).dequantize(), w.dequantize())


@pytest.mark.parametrize("act", [None, POSITION])
def test_threads_and_other_samples_do_not_change_a_bit(act: ActivationSpec | None) -> None:
    w, _, bias, kwargs = made("4x4 stride 2", act=act)
    x, before, found = torch.randn(3, 33, 9, 8), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(transposed(x, w, bias, kwargs))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    assert torch.equal(found[0][1:2], transposed(x[1:2], w, bias, kwargs))
    assert get_kernel(OP, "cpu_int_columns").row_independent


def test_inputs_in_any_form() -> None:
    w, x, bias, kwargs = made("4x4 stride 2")
    y = transposed(x, w, bias, kwargs)
    torch.testing.assert_close(transposed(x[0], w, bias, kwargs), y[0])  # without a batch
    wide = torch.randn(1, 33, 5, 12)
    assert torch.equal(transposed(wide[..., ::2], w, bias, kwargs), transposed(wide[..., ::2].clone(), w, bias, kwargs))
    assert torch.equal(transposed(-(-x)._neg_view()._neg_view(), w, bias, kwargs), y)
    double = transposed(x.double(), w, bias.double(), kwargs)
    torch.testing.assert_close(double, transposed(x.double(), w.dequantize(torch.float64), bias.double(), kwargs))
    meta = transposed(x.to("meta"), w, bias.to("meta"), kwargs)
    assert (meta.device.type, meta.shape) == ("meta", y.shape)
    mapped = torch.func.vmap(lambda row: transposed(row, w, bias, kwargs))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped[0], y)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_layers(kind: type[nn.Module], config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer: Any = kind(48, 20, 4, 2, 1)
    model, x = nn.Sequential(layer), torch.randn(2, 48, *[7] * (layer.weight.ndim - 2))
    exact = model(x).detach()
    (row,) = pw.quantize_(model, config, lambda m, name: True).quantized
    assert row.kernel == "cpu_int_columns"
    assert row.shape == layer.weight.shape == (48, 20, *[4] * (layer.weight.ndim - 2))
    assert row.bytes_after == layer.weight.nbytes
    y = model(x)
    assert sqnr(exact, y.detach()) > (20 if config == "int4" else 36)
    pw.save(model, tmp_path / "m")
    again = nn.Sequential(kind(48, 20, 4, 2, 1))
    pw.load(tmp_path / "m", again)
    assert again[0].weight.spec.layout == "cpu_conv_transposed"
    for other in (again, copy.deepcopy(model)):
        assert torch.equal(other(x), y)
    with torch.no_grad():
        sized = layer(x, output_size=[15] * (layer.weight.ndim - 2))  # chooses the output padding
    assert sized.shape[2:] == (15,) * (layer.weight.ndim - 2)
    pw.dequantize_(model)
    assert sqnr(exact, model(x).detach()) > (20 if config == "int4" else 36)


@pytest.mark.parametrize("config", ["int8", pw.Int8DynamicActivationInt8WeightConfig()])
def test_gradients_and_quantization_aware_training(config: Any) -> None:
    torch.manual_seed(0)
    layer, x = nn.ConvTranspose2d(32, 12, 4, 2, 1), torch.randn(2, 32, 5, 5)
    made = copy.deepcopy(layer)
    pw.quantize_(made, config, lambda m, name: True)
    plain, grads = copy.deepcopy(made), []
    pw.dequantize_(plain)
    for each in (made, plain):
        given = x.clone().requires_grad_()
        each(given).square().sum().backward()
        grads.append((given.grad, each.bias.grad))
    close = {"atol": 1e-4, "rtol": 1e-4} if config == "int8" else {"atol": 1.0, "rtol": 0.1}
    torch.testing.assert_close(*grads, **close)

    pw.quantize_(layer, pw.QATConfig(made_config(config), step="prepare"), lambda m, name: True)
    layer(x).square().sum().backward()
    assert bool(layer.weight.grad.isfinite().all())
    trained = layer(x).detach()
    pw.quantize_(layer, pw.QATConfig(step="convert"))
    assert torch.equal(trained, layer(x))


def made_config(config: Any) -> Any:
    return pw.Int8WeightOnlyConfig() if config == "int8" else config


def test_calibration() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.ConvTranspose2d(32, 12, 4, 2, 1)), [torch.randn(2, 32, 5, 5) for _ in range(2)]
    exact, static = model(data[0]).detach(), copy.deepcopy(model)
    rows = pw.quantize_(model, "int8", lambda m, name: True, calibration=data, algorithm="gptq").quantized
    assert rows[0].note == "rounded to nearest: its blocks are not contiguous along one axis"
    config = pw.calibrate(static, data, pw.Int8StaticActivationInt8WeightConfig, filter_fn=lambda m, name: True)
    pw.quantize_(static, config)
    assert sqnr(exact, static(data[0]).detach()) > 35


def test_what_has_no_kernel() -> None:
    layer, x = nn.ConvTranspose3d(8, 6, 3, 2), torch.randn(1, 8, 3, 3, 3)
    exact = layer(x).detach()
    (row,) = pw.quantize_(layer, "int8", lambda m, name: True).quantized
    assert row.kernel == "dequantize"
    assert sqnr(exact, layer(x).detach()) > 40
    with pytest.raises(pw.PlanError, match="a transposed convolution with groups of channels has no kernel"):
        pw.quantize_(nn.ConvTranspose2d(8, 8, 3, groups=2), "int8", lambda m, name: True)
    w, x = prepare(QT.from_float(torch.randn(32, 4, 3, 3), CHANNEL), (OP,)), torch.randn(2, 32, 5, 5)
    pw.reset_fallbacks()
    y = F.conv_transpose2d(x, w, groups=4)  # a weight of the user's
    torch.testing.assert_close(y, F.conv_transpose2d(x, w.dequantize(), groups=4))
    assert pw.fallbacks() == {"convolution/dequantize": 1}


def test_refusals() -> None:
    def verdict(spec: QuantSpec, shape: tuple[int, ...], act: ActivationSpec | None = None) -> str:
        w = QT.from_float(torch.randn(shape), spec, act=act)
        if conv_transposed.fits(spec, shape) is True:
            w = w.to_layout(conv_transposed.NAME)
        return {name: verdict for name, _, verdict in explain(torch.float32, w, OP).rows}["cpu_int_columns"]

    shape = (32, 4, 3, 3)
    assert verdict(CHANNEL, (8, 4, 2, 2, 2)) == "needs a transposed convolution of one or two dimensions"
    assert verdict(CHANNEL.with_(block=(-1, -1, -1, -1)), shape) == "needs output channels that do not share scales"
    assert "for whole kernels or for each tap" in verdict(CHANNEL.with_(block=(-1, 1, 1, -1)), shape)
    assert "multiples of 32" in verdict(CHANNEL.with_(block=(8, 1, 1, 1)), shape)
    assert verdict(QuantSpec(get_format("e4m3"), (-1, 1, -1, -1)), shape) == "needs integer codes"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_transposed, "FEWEST", 33)
        assert verdict(CHANNEL, shape).endswith("is faster with fewer than 33 input channels")
        assert verdict(CHANNEL, shape, POSITION) == "RUNS"
    sample = ActivationSpec(QuantSpec(INT8, (-1, -1, -1)))
    assert verdict(CHANNEL, shape, sample) == "needs one activation scale per position"


def test_sizes_that_do_not_fit_raise_what_torch_raises() -> None:
    w, x, bias, kwargs = made("4x4 stride 2")
    for args in (
        (x, bias[:5], kwargs), (x, bias, {"stride": 2, "output_padding": 2}),
        (x, bias, {"padding": -1}), (x, bias, {"padding": 20}), (x[..., :0], bias, kwargs), (x, bias, {"stride": 0}),
    ):  # fmt: skip
        given, b, more = args
        with pytest.raises(RuntimeError) as theirs:
            F.conv_transpose2d(given, w.dequantize(), b, **more)
        with pytest.raises(RuntimeError) as mine:
            F.conv_transpose2d(given, w, b, **more)
        assert str(mine.value) == str(theirs.value)
    with pytest.raises(RuntimeError, match=r"\[1, 32, 5, 6\].*must have 33 channels"):
        F.conv_transpose2d(x[:, :32], w, bias, **kwargs)
