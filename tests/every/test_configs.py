"""Every config there is, on a small model. A new one is tested by being exported; one that cannot be built without
arguments, or is worth testing with others too, has its examples below.
"""

import copy
import dataclasses
import io
import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT4
from pennyweight.core.numerics import sqnr
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning import configs

TYPES = {
    value
    for module in (pw, configs)
    for value in (getattr(module, name) for name in module.__all__)
    if isinstance(value, type) and issubclass(value, pw.AOBaseConfig) and value is not pw.AOBaseConfig
}
ASYMMETRIC, NO_CLIP = pw.MappingType.ASYMMETRIC, pw.MappingType.SYMMETRIC_NO_CLIPPING_ERR
EXAMPLES = {
    pw.Int8WeightOnlyConfig: ["", "group_size=32", "granularity=pw.PerTensor()"],
    pw.Int8DynamicActivationInt8WeightConfig: [
        "",
        "act_mapping_type=ASYMMETRIC",
        "granularity=(pw.PerTensor(), pw.PerRow())",
        "reduce_range=True",
        "act_group_size=32",
        "act_mapping_type=ASYMMETRIC, granularity=pw.PerGroup(32)",
    ],
    pw.Int8StaticActivationInt8WeightConfig: [
        "0.03",
        "0.03, -5, act_mapping_type=ASYMMETRIC",
        "torch.tensor([0.06]), reduce_range=True",
    ],
    pw.Int4WeightOnlyConfig: ["", "group_size=32"],
    pw.IntxWeightOnlyConfig: [
        "",
        *(f"torch.int{b}, granularity=pw.PerGroup(16)" for b in range(2, 8)),
        "torch.int1, mapping_type=NO_CLIP",
        "torch.int4, mapping_type=ASYMMETRIC, scale_dtype=torch.float32",
    ],
    configs.Int8DynamicActivationInt4WeightConfig: ["", "act_group_size=32"],
    pw.Int8DynamicActivationIntxWeightConfig: ["", "torch.int4, act_mapping_type=pw.MappingType.SYMMETRIC"],
    pw.UIntXWeightOnlyConfig: ["", "torch.uint8", "torch.uint2, group_size=32"],
    pw.FPXWeightOnlyConfig: ["", "2, 3", "2, 1"],
    pw.Float8WeightOnlyConfig: ["", "torch.float8_e5m2", "granularity=pw.PerBlock((16, 16))"],
    pw.Float8DynamicActivationFloat8WeightConfig: ["", "granularity=pw.PerRow()"],
    pw.Float8StaticActivationFloat8WeightConfig: ["scale=0.02"],
    pw.MXWeightOnlyConfig: ["", "'e3m2'", "'e2m1', scaling_mode='even'"],
    pw.MXDynamicActivationMXWeightConfig: ["", "weight_dtype='e2m1', scaling_mode='floor'"],
    pw.NVFP4WeightOnlyConfig: ["", "use_dynamic_per_tensor_scale=False"],
    pw.NVFP4DynamicActivationNVFP4WeightConfig: ["", "use_dynamic_per_tensor_scale=False", "act_scale=0.002"],
    pw.CodebookWeightOnlyConfig: ["", "bits=3, dim=1, group_size=32", "bits=4, dim=2"],
    pw.NF4WeightOnlyConfig: ["", "double_quant=False"],
    pw.SpecConfig: ["QuantSpec(INT4, (32,))", "QuantSpec(INT4, (32,)), rule='mse'"],
    pw.FqnToConfig: ["{'0': pw.Int8WeightOnlyConfig(), 're:2': pw.Int4WeightOnlyConfig(group_size=32)}"],
}
ELSEWHERE = {
    configs.ContractedAxis: "for bare parameters, see tests/planning/test_parameters.py",
    pw.QATConfig: "goes around each of these, see test_qat.py",
}
# The least output SQNR in dB on the model below, by bits of the weight; activations in 8 bits cost little of it.
LEAST = {1: -6, 2: 1, 3: 9, 4: 15, 5: 20, 6: 22, 7: 24, 8: 23}


def build(text: str) -> pw.AOBaseConfig:
    return eval(text, {**globals(), "pw": pw})


CASES = [
    f"{'configs' if not hasattr(pw, t.__name__) else 'pw'}.{t.__name__}({args})"
    for t in sorted(TYPES - ELSEWHERE.keys(), key=lambda t: t.__name__)
    for args in EXAMPLES.get(t, [""])
]
every = pytest.mark.parametrize("text", CASES)


def small(k: int = 96, n: int = 64, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.Linear(n, n)).to(dtype).eval()


def weights(model: nn.Module) -> Iterator[tuple[str, AffineQuantizedTensor]]:
    for name, p in model.named_parameters():
        if isinstance(p, AffineQuantizedTensor):
            yield name, p


def test_each_example_is_of_an_exported_config() -> None:
    assert EXAMPLES.keys() | ELSEWHERE.keys() <= TYPES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every
def test_quantizes_and_the_report_is_true(text: str, dtype: torch.dtype) -> None:
    model, x = small(dtype=dtype), torch.randn(40, 96).to(dtype)
    exact, floats = model(x).detach(), copy.deepcopy(model).state_dict()
    planned = pw.quantize_(model, build(text), dry_run=True)
    assert not list(weights(model))
    report = pw.quantize_(model, build(text))
    assert [name for name, _ in weights(model)] == ["0.weight", "2.weight"]
    for row, promise in zip(report.rows, planned.rows, strict=True):
        p = model.get_parameter(row.name)
        assert row.bytes_after == p.nbytes
        assert row.bytes_before == floats[row.name].nbytes
        assert (row.name, row.scheme, row.kernel) == (promise.name, promise.scheme, promise.kernel)
        if isinstance(p, AffineQuantizedTensor):
            assert row.sqnr == pytest.approx(p.error(floats[row.name]), abs=0.01)
            assert promise.bytes_after == row.bytes_after
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())
    assert json.loads(report.to_json())["rows"][0]["name"] == "0.weight"
    assert "0.weight" in str(report)
    got = model(x)
    assert got.dtype == dtype
    assert got.isfinite().all()
    bits = min(w.spec.format.bits // w.spec.format.dim for _, w in weights(model))
    coarse = any(w.act is not None and w.act.spec.format.bits <= 4 for _, w in weights(model))
    assert sqnr(exact, got.detach()) > LEAST[bits] - (3 if coarse else 0)  # an equal error of the input: 3 dB


@every
def test_a_second_time_is_no_change_and_another_config_goes_through_float_once(text: str) -> None:
    model = small()
    pw.quantize_(model, build(text))
    first = dict(weights(model))
    report = pw.quantize_(model, build(text))
    assert all(w is first[name] for name, w in weights(model))
    assert all("already quantized" in r.note and r.bytes_after == first[r.name].nbytes for r in report.quantized)
    other = pw.SpecConfig(QuantSpec(INT4, (24,)))
    expected = {name: AffineQuantizedTensor.from_float(w.dequantize(), other.weight) for name, w in first.items()}
    report = pw.quantize_(model, other)
    assert all("requantized" in r.note for r in report.quantized)
    for name, w in weights(model):
        assert torch.equal(w.dequantize(), expected[name].dequantize())


@every
def test_dequantize_gives_plain_parameters_of_the_same_values(text: str) -> None:
    model = small(dtype=torch.bfloat16)
    pw.quantize_(model, build(text))
    values = {name: w.dequantize() for name, w in weights(model)}
    report = pw.dequantize_(model)
    assert not list(weights(model))
    assert [r.name for r in report.rows] == list(values)
    for name, value in values.items():
        p = model.get_parameter(name)
        assert type(p) is nn.Parameter
        assert p.is_contiguous()
        assert torch.equal(p, value)
    small(dtype=torch.bfloat16).load_state_dict(model.state_dict())


@every
def test_the_gradient_reaches_the_input(text: str) -> None:
    model = small()
    pw.quantize_(model, build(text))
    layer, x = model[0], torch.randn(5, 96, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.dequantize().sum(0).expand(5, -1))
    assert layer.bias.requires_grad
    assert not layer.weight.requires_grad


@every
def test_copies_and_state_dicts(text: str) -> None:
    model, x = small(), torch.randn(3, 96)
    pw.quantize_(model, build(text))
    y = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), y)
    other = small()
    pw.quantize_(other, build(text))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), y)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = small()
    plain.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(plain(x), y)
    pw.dequantize_(twin)
    assert torch.equal(model(x), y)


@every
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_prime_sizes(text: str, rows: int) -> None:
    model, x = small(61, 37), torch.randn(rows, 61)
    exact = model(x).detach()
    pw.quantize_(model, build(text))
    got = model(x)
    assert got.shape == exact.shape
    assert got.isfinite().all()
    if rows == 17:
        bits = min(w.spec.format.bits // w.spec.format.dim for _, w in weights(model))
        assert sqnr(exact, got.detach()) > LEAST[bits] - 3
    batched = model(x.reshape(rows, 1, 61).expand(rows, 2, 61))
    assert batched.shape == (rows, 2, 37)


@every
@pytest.mark.parametrize("value", [0.0, 0.37, -1e-30, 3e4])
def test_constant_weights(text: str, value: float) -> None:
    model = small()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.fill_(value)
    report = pw.quantize_(model, build(text))
    assert model(torch.randn(2, 96)).isfinite().all()
    json.loads(report.to_json())
    for _, w in weights(model):
        assert w.dequantize().isfinite().all()
        assert w.dequantize().abs().max() <= abs(value) * 1.5
        assert value or not w.dequantize().any()


@every
def test_a_config_is_a_value(text: str) -> None:
    a, b = build(text), build(text)
    assert a == b
    assert hash(a) == hash(b)
    assert copy.deepcopy(a) == a
    assert a != pw.SpecConfig(QuantSpec(INT4, (24,)))
    assert repr(a).startswith(type(a).__name__)
    field = dataclasses.fields(a)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(a, field, None)
    if not isinstance(a, (pw.SpecConfig, pw.FqnToConfig)):
        scope = {**vars(pw), "torch": torch}
        assert eval(str(a), scope) == a  # str() is the call that makes it
