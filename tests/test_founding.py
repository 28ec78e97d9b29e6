"""What the founding requests asked for, each in a few lines, on every config they name."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw

CONFIGS = [
    pw.Int8WeightOnlyConfig(),
    pw.Int8DynamicActivationInt8WeightConfig(),
    pw.Int4WeightOnlyConfig(group_size=32),
    pw.Int8DynamicActivationInt4WeightConfig(),
    pw.UIntXWeightOnlyConfig("uint4", 32),
    pw.Float8WeightOnlyConfig(),
]
TOLERANCE = 8e-3  # relative; bfloat16 kernels round their result


@torch.no_grad()
def close(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm()) < TOLERANCE


@pytest.fixture(params=CONFIGS, ids=lambda c: type(c).__name__)
def quantized(request):
    torch.manual_seed(0)
    linear = nn.Linear(128, 64)
    pw.quantize_(linear, request.param)
    return linear


def test_direct_matmul_in_both_operand_orders_equals_the_module(quantized):
    x, w = torch.randn(5, 128), quantized.weight
    through_module = quantized(x) - quantized.bias
    assert close(x @ w.t(), through_module)
    assert close(x @ w.T, through_module)
    assert close(torch.matmul(x, w.t()), through_module)
    assert close(torch.addmm(quantized.bias, x, w.t()), quantized(x))
    assert close((w @ x.t()).t(), through_module)
    assert close(torch.matmul(w, x.t()).t(), through_module)
    assert close(torch.einsum("bk,nk->bn", x, w), through_module)


def test_quantized_linear_op_is_callable(quantized):
    x, w = torch.randn(5, 128), quantized.weight
    assert torch.equal(w._quantized_linear_op(x, w, quantized.bias), quantized(x))
    assert close(w._quantized_linear_op(x, w, None) + quantized.bias, quantized(x))


def test_direct_access_to_the_quantized_data(quantized):
    w = quantized.weight
    plain = w.tensor_impl
    codes, scale, zero = plain.int_data, plain.scale, plain.zero_point
    assert codes.shape == w.shape
    group = w.shape[1] // scale.shape[1]
    wide = scale.float().repeat_interleave(group, 1)
    if w.spec.offset is not None:  # a real offset: the value of code 8
        value = (codes.float() - w.spec.mid) * wide + zero.float().repeat_interleave(group, 1)
    else:
        value = (codes.float() - zero.float().repeat_interleave(group, 1)) * wide
    assert torch.allclose(value, w.dequantize(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_packs_and_multiplies_on_a_cpu(dtype):
    """By hand with aten's two ops, which want int32 codes [N, K], and through the config: the same numbers."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=False, dtype=dtype)
    pw.quantize_(linear, pw.Int4WeightOnlyConfig(group_size=64))
    plain = linear.weight.tensor_impl
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain.int_data.to(torch.int32), 1)
    assert packed.shape == (64, 128)
    both = torch.stack([plain.scale, plain.zero_point], -1).transpose(0, 1).contiguous().to(torch.bfloat16)
    x = torch.randn(3, 256, dtype=dtype)
    by_hand = torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), packed, 64, both)
    packed_for_aten = linear.weight.to_layout("torch_int4")
    assert torch.equal(F.linear(x, packed_for_aten), by_hand.to(dtype))
    assert (linear(x).double() - by_hand.double()).abs().max() <= 2**-6 * by_hand.abs().max()  # rounds x and y less
    assert sum(verdict == "RUNS" for _, _, verdict in pw.explain(x, linear.weight).rows) == 1


def test_config_objects_aliases_and_own_handlers():
    class Halve(pw.AOBaseConfig):
        pass

    @pw.register_quantize_module_handler(Halve)
    def halve(module, config):
        module.weight = nn.Parameter(module.weight / 2)
        return module

    model = nn.Sequential(nn.Linear(32, 32))
    other, before = copy.deepcopy(model), model[0].weight.detach().clone()
    report = pw.quantize_(model, Halve())
    assert torch.equal(model[0].weight, before / 2)
    assert report.quantized[0].name == "0"
    pw.quantize_(other, pw.int4_weight_only(group_size=32))
    spec = other[0].weight.spec
    assert (spec.format.name, spec.block, spec.mid, spec.scale, spec.offset) == (
        "uint4",
        (32,),
        8,
        *[torch.float32] * 2,
    )
    assert pw.int8_weight_only is pw.Int8WeightOnlyConfig


def test_gradient_reaches_the_input(quantized):
    x = torch.randn(5, 128, requires_grad=True)
    F.linear(x, quantized.weight).sum().backward()
    assert torch.allclose(x.grad, torch.ones(5, 64) @ quantized.weight.dequantize(), atol=1e-4)
