"""Through our configs: codes, scales and zero points bit-equal to torchao's, outputs within its tolerance.

The vectors are tests/golden/torchao_0.18 (see the README there). Where torchao itself fails or gives NaN, ours must be
finite instead; those cases stand at the end with the reason.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight.core.spec import dtype_name
from pennyweight.kernels.activation import encode_activation
from pennyweight.kernels.table import case_of, select

GOLDEN = Path(__file__).parents[1] / "golden"
TABLE = json.loads((GOLDEN / "torchao_0.18.json").read_text())
CASES, TOLERANCE = TABLE["cases"], TABLE["approx_tolerance"]
TENSORS = load_file(str(GOLDEN / "torchao_0.18.safetensors"))
FAMILIES = ("int8_wo.", "int8_dyn.", "int8_static.", "intx.", "int8_dyn_int4.", "int4_wo.", "float8_wo.")
NAMES = [name for name in CASES if name.startswith(FAMILIES)]
# torchao rounds the correction for the zero point to the output's dtype before it subtracts it
TORCHAO_ROUNDS_MORE = [name for name in NAMES if name.startswith("int8_dyn.asym") and name.endswith(("bf16", "f16"))]


def tensor(name: str, role: str) -> Tensor:
    case = CASES[name]
    return TENSORS[case.get("same_as", {}).get(role, f"{name}.{role}")]


def roles(name: str) -> set[str]:
    return set(CASES[name]["tensors"]) | set(CASES[name].get("same_as", {}))


def source(key: str) -> Tensor:
    """An input, stored or derived as the README of the vectors says."""
    kind, tag = key.split(".")
    if kind == "v":
        return TENSORS[f"w.{tag}"][:8]
    if kind == "nz":
        return torch.cat([TENSORS[f"w.{tag}"][:2], TENSORS[f"w.{tag}"][3:17]])
    return TENSORS[key].clone()  # in memory of its own: those of the file are not aligned


def value(data: Any) -> Any:
    """A config argument from its JSON form."""
    if isinstance(data, list):
        if isinstance(data[0], list):
            return tuple(map(value, data))
        return getattr(pw, data[0])(*data[1:])
    if isinstance(data, str):
        return getattr(torch, data) if hasattr(torch, data) else getattr(pw.MappingType, data)
    return data


def config(name: str) -> pw.AOBaseConfig:
    case = CASES[name]
    args = {k: value(v) for k, v in case["args"].items()}
    if name.startswith("int8_static."):
        args["act_quant_scale"] = tensor(name, "act_scale")
        if "asym" in name:
            args["act_quant_zero_point"] = tensor(name, "act_zero_point")
    # the CPU sibling of Int4WeightOnlyConfig stands among torchao's prototypes
    return getattr(pw, case["api"].rsplit(".", 1)[1].removeprefix("Prototype"))(**args)


def quantized(name: str) -> nn.Linear:
    inputs = CASES[name]["inputs"]
    weight, bias = source(inputs["weight"]), source(inputs["bias"])
    layer = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias[: weight.shape[0]].clone())
    pw.quantize_(layer, config(name))
    return layer


def as_stored(got: Tensor, want: Tensor) -> Tensor:
    """Ours in the shape and dtype that the vectors use; float8 codes are bytes there."""
    if got.dtype.itemsize == 1 and got.is_floating_point():
        got = got.view(torch.uint8)
    return got.to(want.dtype).reshape(want.shape)


def assert_bits(role: str, got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(as_stored(got, want), want, rtol=0, atol=0, msg=lambda m: f"{role}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_weight_bits(name: str) -> None:
    impl = quantized(name).weight.tensor_impl
    for role, got in (("codes", impl.int_data), ("scale", impl.scale), ("zero_point", impl.zero_point)):
        if role in roles(name):
            assert_bits(role, got, tensor(name, role))
    assert impl.scale.dtype == tensor(name, "scale").dtype


@pytest.mark.parametrize("name", [n for n in NAMES if "act_codes" in roles(n)])
def test_activation_bits(name: str) -> None:
    x, w = source(CASES[name]["inputs"]["x"]), quantized(name).weight
    q = encode_activation(x, w.act, w.act_scale, w.act_zero_point)
    for role, got in (("act_codes", q.codes), ("act_scale", q.scale), ("act_zero_point", q.zero_point)):
        if role in roles(name) and got is not None:
            assert_bits(role, got, tensor(name, role))


@pytest.mark.parametrize("name", [n for n in NAMES if "output" in roles(n)])
def test_output(name: str) -> None:
    layer, x = quantized(name), source(CASES[name]["inputs"]["x"])
    with torch.no_grad():
        got, want = layer(x), tensor(name, "output")
    assert got.dtype == want.dtype
    kernel = select("linear", case_of(layer.weight, x.dtype))  # one that computes in bfloat16 says so
    if name not in TORCHAO_ROUNDS_MORE:
        tolerance = max(TOLERANCE[t] for t in (kernel.tolerance, dtype_name(want.dtype)) if t in TOLERANCE)
        assert (got.double() - want.double()).abs().max() <= tolerance * want.abs().max()
    weight, bias = source(CASES[name]["inputs"]["weight"]), layer.bias.detach()
    exact = x.double() @ weight.double().T + bias.double()
    ours, theirs = sqnr(exact, got), sqnr(exact, want)
    if want.dtype is torch.float32:
        assert abs(ours - theirs) <= 0.1
    else:  # 240 outputs, each rounded to 8 or 11 bits, scatter either figure about that of the weights alone
        from_weights = sqnr(exact, x.double() @ layer.weight.dequantize(torch.float64).T + bias.double())
        # dB; static scales per row in bfloat16: 0.23 apart, in float32 0.1 at most
        slack = 0.25 if name.startswith("int8_static.sym_per_row") else 0.2
        assert ours >= min(theirs, from_weights) - slack


@pytest.mark.parametrize("tag", ["f32", "bf16", "f16"])
def test_float8_of_a_zero_row(tag: str) -> None:
    """torchao divides 0 by the scale 0. The other rows are those of a case that it gets right."""
    weight, case = source(f"v.{tag}"), f"float8_wo.e4m3fn.per_row.{tag}"
    layer = nn.Linear(128, 8, bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight)
    pw.quantize_(layer, pw.Float8WeightOnlyConfig())
    zero = weight.eq(0).all(1)
    assert zero.tolist() == [False, False, True, False, False, False, False, False]
    impl = layer.weight.tensor_impl
    assert_bits("codes", impl.int_data.view(torch.uint8)[~zero], tensor(case, "codes")[:7])
    assert_bits("scale", impl.scale[~zero], tensor(case, "scale")[:7])
    assert not layer.weight.dequantize()[zero].any()
    assert layer(source(f"x.{tag}")).isfinite().all()


@pytest.mark.parametrize("tag", ["f32", "bf16", "f16"])
def test_int1_without_clipping(tag: str) -> None:
    """torchao divides by the greatest int1, which is 0; int1 has no positive number that could clip."""
    layer = nn.Linear(128, 8, bias=False, dtype=source(f"v.{tag}").dtype)
    layer.weight = nn.Parameter(source(f"v.{tag}"))
    pw.quantize_(layer, pw.IntxWeightOnlyConfig(torch.int1, mapping_type=pw.MappingType.SYMMETRIC_NO_CLIPPING_ERR))
    assert_bits("scale", layer.weight.tensor_impl.scale, (-source(f"v.{tag}").amin(1, keepdim=True)).clamp(
        min=torch.finfo(layer.weight.dtype).smallest_normal))  # fmt: skip
    assert layer(source(f"x.{tag}")).isfinite().all()
