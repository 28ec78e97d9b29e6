"""Every form of the table, in one file for each style: onnxruntime's results beside dequantize-then-compute."""

from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core import formats, spec
from pennyweight.core.numerics import dequantize, fake_quantize, quantize
from pennyweight.export import onnx_patterns
from pennyweight.export.onnx import OnnxReport, export_onnx
from pennyweight.kernels.activation import static_params

K, N = 70, 33  # neither fills blocks nor bytes
S = pw.QuantSpec
I4, I8, U4 = formats.INT4, formats.INT8, formats.UINT4
TOKEN = pw.ActivationSpec(S(I8, (-1,)), eps=1e-6)
ZEROED = pw.ActivationSpec(S(I8, (-1,), zero_point=True))
STATIC = pw.ActivationSpec(S(I8, None), "static")
STATIC_ZEROED = pw.ActivationSpec(S(I8, None, zero_point=True), "static")
E4M3_TOKEN = pw.ActivationSpec(S(formats.E4M3, (-1,)))
DECODE, NBITS, DQ, INTEGER = "decode + MatMul", "MatMulNBits", "DequantizeLinear + MatMul", "MatMulInteger"


class Layer(NamedTuple):
    """A config and the forms that it gets in the styles auto, matmulnbits and qdq."""

    config: Any
    auto: str
    matmulnbits: str
    qdq: str


def weight(s: pw.QuantSpec, auto: str = DECODE, packed: str = NBITS, qdq: str = DQ, **more: Any) -> Layer:
    return Layer(pw.SpecConfig(s, **more), auto, packed, qdq)


LAYERS = {
    "int8_row": weight(S(I8, (-1,))),
    "int8_tensor": weight(S(I8, None)),
    "int8_group": weight(S(I8, (32,))),
    "int8_row_zero": weight(S(I8, (-1,), zero_point=True)),
    "uint8_group_zero": weight(S(formats.UINT8, (64,), zero_point=True)),
    "int5_group": weight(S(formats.INT5, (32,))),
    "int4_group": weight(S(I4, (32,)), NBITS),
    "int4_row": weight(S(I4, (-1,)), NBITS),
    "int4_16": weight(S(I4, (16,)), NBITS),
    "int4_48": weight(S(I4, (48,)), NBITS),
    "int4_24": weight(S(I4, (24,)), DECODE, DECODE),
    "int4_odd": weight(S(I4, (7,)), DECODE, DECODE),
    "int4_group_zero": weight(S(I4, (32,), zero_point=True), NBITS),
    "uint4_zero": weight(S(U4, (32,), torch.bfloat16, zero_point=True), NBITS),
    "uint4_mid": weight(S(U4, (32,), mid=8), NBITS),
    "uint4_mid_7": weight(S(U4, (32,), mid=7), NBITS),
    "tinygemm": weight(S(U4, (32,), torch.bfloat16, offset=torch.bfloat16, mid=8), NBITS),
    "offset_row": weight(S(U4, (-1,), offset=torch.float32), NBITS),
    "offset_uint8": weight(S(formats.UINT8, (24,), offset=torch.float32), DECODE, DECODE),
    "int3": weight(S(formats.INT3, (32,)), NBITS),
    "uint2_zero": weight(S(formats.UINT2, (32,), zero_point=True)),
    "int2": weight(S(formats.INT2, (64,))),
    "int1": weight(S(formats.INT1, (32,)), DECODE, DECODE),
    "ternary": weight(spec.TERNARY_TENSOR),
    "e4m3": weight(S(formats.E4M3, (-1,)), DECODE, DECODE),
    "e5m2": weight(S(formats.E5M2, (-1,)), DECODE, DECODE),
    "e4m3_blocks": weight(S(formats.E4M3, (16, 32)), DECODE, DECODE),
    "mxfp8": weight(spec.MXFP8, DECODE, DECODE),
    "mxfp4": weight(spec.MXFP4, DECODE, DECODE, DECODE),
    "nvfp4": weight(spec.NVFP4, DECODE, DECODE, DECODE),
    "fp6": weight(S(formats.E3M2, (-1,)), DECODE, DECODE, DECODE),
    "nf4": weight(S(formats.NF4, (64,)), DECODE, DECODE, DECODE),
    "nf4_double": weight(spec.NF4_DOUBLE, DECODE, DECODE, DECODE),
    "dynamic8": weight(S(formats.DYNAMIC8, (32,)), DECODE, DECODE, DECODE),
    "8da8w": weight(S(I8, (-1,)), INTEGER, INTEGER, INTEGER, act=TOKEN),
    "8da8w_zero": weight(S(I8, (-1,)), INTEGER, INTEGER, INTEGER, act=ZEROED),
    "8da8w_tensor": weight(S(I8, None), INTEGER, INTEGER, INTEGER, act=pw.ActivationSpec(S(I8, None))),
    "7da7w": weight(S(formats.INT7, (-1,)), INTEGER, INTEGER, INTEGER, act=pw.ActivationSpec(S(formats.INT7, (-1,)))),
    "8da4w_row": weight(S(I4, (-1,)), INTEGER, INTEGER, INTEGER, act=TOKEN),
    "8da4w": weight(S(I4, (32,)), NBITS, NBITS, DQ, act=ZEROED),
    "8da8w_absmax": weight(S(I8, (-1,)), INTEGER, INTEGER, INTEGER, act=pw.ActivationSpec(S(I8, (-1,)), rule="absmax")),
    "8da_groups": weight(S(I4, (16,)), NBITS, NBITS, DQ, act=pw.ActivationSpec(S(I8, (10,)))),
    "static": weight(S(I8, (-1,)), INTEGER, INTEGER, "QuantizeLinear + MatMul", act=STATIC, act_scale=0.02),
    "static_zero": weight(
        S(I8, (-1,)), INTEGER, INTEGER, "QuantizeLinear + MatMul", act=STATIC_ZEROED, act_scale=0.03, act_zero_point=-9
    ),
    "static_int4": weight(S(I4, (32,)), NBITS, NBITS, "QuantizeLinear + MatMul", act=STATIC, act_scale=0.02),
    "fp8_fp8": weight(S(formats.E4M3, (-1,)), DECODE, DECODE, act=E4M3_TOKEN),
}
QDQ_STEP = ("static", "static_zero", "static_int4")  # codes may differ by one where x / scale is a tie


class Many(nn.Module):
    """All layers side by side, so that one file holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({n: nn.Linear(K, N, bias=i % 2 == 0) for i, n in enumerate(LAYERS)})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers.values())


class Ran(NamedTuple):
    model: Many
    x: Tensor
    report: OnnxReport
    plain: dict[str, np.ndarray]  # outputs with graph optimizations off
    default: dict[str, np.ndarray]


def session(path: str, *, optimized: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3  # it warns of nodes that it folds on the CPU
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=onnx_patterns.STYLES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    torch.manual_seed(0)
    model = Many().eval()
    for name, layer in LAYERS.items():
        pw.quantize_(model.layers[name], layer.config)
    path = str(tmp_path_factory.mktemp("onnx") / f"{request.param}.onnx")
    report = export_onnx(
        model, (torch.randn(2, 3, K),), path, style=request.param, output_names=[f"y_{n}" for n in LAYERS]
    )
    x = torch.randn(5, 3, K)
    x[1, 1] = 0  # a token without a range
    results = []
    for optimized in (False, True):
        got = session(path, optimized=optimized).run(None, {report.inputs[0]: x.numpy()})
        results.append(dict(zip(LAYERS, got, strict=True)))
    return Ran(model, x, report, *results)


def reference(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """y in float64 of float32 numbers, and the sum of the sizes of what is added."""
    w = layer.weight
    if w.act is not None and w.act.mode == "dynamic":
        x = fake_quantize(x, w.act.spec, w.act.rule, w.act.eps)
    elif w.act is not None:
        parts = quantize(x, w.act.spec, params=static_params(x, w.act_scale, w.act_zero_point))
        x = dequantize(parts, w.act.spec, x.shape)
    floats, x = w.dequantize().double(), x.double()
    size = x.abs() @ floats.abs().t()
    if w.spec.offset is not None:  # two products: their parts may be greater than their sum
        offset = w.plain_parts().offset.double().abs().repeat_interleave(w.codes.shape[1] // w.offset.shape[1], 1)
        size = size + 2 * x.abs() @ offset[:, :K].t()
    y = x @ floats.t()
    return (y, size) if layer.bias is None else (y + layer.bias.double(), size + layer.bias.double().abs())


@pytest.mark.parametrize("optimized", [False, True], ids=["plain", "default"])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_results_are_the_reference_s(ran: Ran, name: str, optimized: bool) -> None:
    style = ran.report.config
    layer = ran.model.layers[name]
    y, size = reference(layer, ran.x)
    got = torch.from_numpy((ran.default if optimized else ran.plain)[name]).double()
    assert got.shape == y.shape
    if "qdq" in style and optimized:  # DequantizeLinear + MatMul may be computed with 8-bit inputs
        assert float((got - y).abs().max()) <= 0.03 * float(y.abs().max())
        return
    slack = 0.0
    if "qdq" in style and name in QDQ_STEP:  # one step of one input
        slack = float(layer.weight.act_scale) * float(layer.weight.dequantize().abs().max())
    assert bool(((got - y).abs() <= 1e-6 * size + slack).all()), float(((got - y).abs() / size).max())


@pytest.mark.parametrize("name", LAYERS)
def test_the_form_is_that_of_the_table(ran: Ran, name: str) -> None:
    style = ran.report.config.split("'")[1]
    (row,) = [r for r in ran.report.rows if r.name == f"layers.{name}.weight"]
    assert row.kernel == getattr(LAYERS[name], style)
    assert row.scheme.startswith(str(ran.model.layers[name].weight.spec.with_(layout="plain")))


@pytest.mark.parametrize("name", [n for n, layer in LAYERS.items() if layer.auto == INTEGER])
@torch.no_grad()
def test_integer_sums_are_equal_bit_for_bit(ran: Ran, name: str) -> None:
    layer, x = ran.model.layers[name], ran.x
    w = layer.weight
    if "qdq" in ran.report.config and name in QDQ_STEP:
        pytest.skip("QuantizeLinear divides by the scale")
    if w.act.mode == "dynamic":
        q = quantize(x, w.act.spec, w.act.rule, w.act.eps)
    else:
        q = quantize(x, w.act.spec, params=static_params(x, w.act_scale, w.act_zero_point))
    codes = q.codes.to(torch.int32) - (0 if q.zero_point is None else q.zero_point.to(torch.int32))
    parts = w.plain_parts()
    sums = codes.reshape(-1, K) @ parts.codes.to(torch.int32).t()
    y = sums.float().reshape(*x.shape[:-1], N) * q.scale * parts.scale.reshape(-1)
    y = y if layer.bias is None else y + layer.bias
    for got in (ran.plain, ran.default):
        assert np.array_equal(got[name], y.numpy())


def test_every_form_of_linear_has_a_layer() -> None:
    seen = {form for layer in LAYERS.values() for form in layer[1:]}
    assert seen == {form.name for form in onnx_patterns.LINEAR}
