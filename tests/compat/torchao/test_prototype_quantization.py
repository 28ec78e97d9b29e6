"""torchao.prototype.quantization: static float8, packed unsigned integers, embeddings, lookup tables."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pennyweight.compat.torchao.prototype import quantization as prototype
from pennyweight.compat.torchao.prototype.quantization import quant_api
from pennyweight.compat.torchao.prototype.quantization.embedding import api
from pennyweight.compat.torchao.prototype.quantization.float8_static_quant import prototype_float8_tensor
from pennyweight.compat.torchao.prototype.quantization.int8_lut_tensor import Int8LutTensor
from pennyweight.compat.torchao.prototype.quantization.uintx.uintx_bit_packed_tensor import UIntxBitPackedTensor
from pennyweight.compat.torchao.quantization import (
    Float8Tensor,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    quant_primitives,
    quantize_,
)
from pennyweight.core.tensor import AffineQuantizedTensor

Static = quant_api.Float8StaticActivationFloat8WeightConfig
PrototypeFloat8Tensor = prototype_float8_tensor.PrototypeFloat8Tensor
E4M3 = torch.float8_e4m3fn


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 16, bias=False))


def _rounded(x: torch.Tensor, scale: float, dtype: torch.dtype = E4M3) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return (x / scale).clamp(-most, most).to(dtype).float() * scale


# -- static float8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("granularity", [None, PerRow()])
def test_observe_then_convert(output: bool, granularity: Any) -> None:
    model, x = _model(), torch.randn(20, 16)
    float_weight, want = model[0].weight.detach().clone(), _model()[0](x)
    quantize_(model, Static(step="prepare", quantize_and_dequantize_output=output, granularity=granularity))
    assert [type(m) for m in model] == [quant_api.Float8ObservedLinear, nn.Softmax, quant_api.Float8ObservedLinear]
    model(x / 2)
    assert torch.equal(model[0](x), want)
    assert (model[0].output_act_obs is not None) == output
    quantize_(model, Static(step="CONVERT", granularity=granularity))
    w = model[0].weight
    assert isinstance(w, PrototypeFloat8Tensor)
    assert not isinstance(w, Float8Tensor)
    scale = float(x.abs().max() / 448)
    assert w.act_quant_scale.item() == pytest.approx(scale, rel=1e-6)
    axis = (0, 1) if granularity is None else 1
    scales = float_weight.abs().amax(axis, keepdim=True) / 448
    torch.testing.assert_close(w.dequantize(), (float_weight / scales).to(E4M3).float() * scales)
    product = F.linear(_rounded(x, w.act_quant_scale.item()), w.dequantize(), model[0].bias)
    if output:
        assert type(model[0]).__name__ == "Float8OutputLinear"
        assert "0.output_act_quant_scale" in model.state_dict()
        product = _rounded(product, model[0].output_act_quant_scale.item())
    got = model[0](x)
    off = (got - product).abs() > 1e-4  # where the sum is near a rounding boundary
    assert float(off.float().mean()) < 0.02
    assert ((got - want).norm() / want.norm()).item() < 0.06
    assert model[2].bias is None
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_softmax_outputs_keep_their_range() -> None:
    model, x = _model(), torch.randn(5, 32)

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Softmax)

    want = model[1](x)
    quantize_(model, Static(step="prepare"), chosen)
    assert type(model[1]) is quant_api.Float8ObservedSoftmax
    assert torch.equal(model[1](x), want)
    quantize_(model, Static(step="convert"), chosen)
    assert type(model[1]) is quant_api.Float8QuantizedSoftmax
    assert model[1].dim == -1
    assert torch.equal(model[1](x), _rounded(want, model[1].output_act_quant_scale.item()))
    torch.testing.assert_close(model[1](x), want, rtol=0.07, atol=1e-4)
    assert "1.output_act_quant_scale" in model.state_dict()
    plain = quant_api.Float8QuantizedSoftmax(dim=0)
    assert torch.equal(plain(x), x.softmax(0))


def test_a_scale_that_is_given() -> None:
    from pennyweight.compat.torchao import quantization

    assert quantization.Float8StaticActivationFloat8WeightConfig is Static  # as it was called before 0.16
    x = torch.randn(20, 16)
    outputs = []
    for config in (
        Static(act_quant_scale=torch.tensor([[0.02]])),
        Static(None, 0.02),
        Static(torch.tensor(0.02), E4M3, E4M3),  # by place, before 0.16
        quant_api.float8_static_activation_float8_weight(scale=torch.tensor(0.02)),
    ):
        assert config.scale == config.act_quant_scale == pytest.approx(0.02)
        model = _model()
        quantize_(model, config)
        assert type(model[0]) is nn.Linear
        outputs.append(model[0](x))
    assert all(torch.equal(outputs[0], other) for other in outputs)
    rounding = Static(act_quant_scale=0.02, output_act_quant_scale=0.01)
    model = _model()
    quantize_(model, rounding, lambda module, name: name == "0")
    assert torch.equal(model[0](x), _rounded(outputs[0], model[0].output_act_quant_scale.item()))
    kwargs = rounding.get_act_quant_kwargs()
    assert (kwargs.float8_dtype, kwargs.granularity) == (E4M3, PerTensor())
    for make, says in (
        (lambda: Static(step="smooth"), "is not one of"),
        (lambda: Static(act_quant_scale=0.1, scale=0.1), "older name"),
        (lambda: Static(act_quant_scale=torch.ones(2, 1)), "act_quant_scale"),
        (lambda: quantize_(_model(), Static()), "act_quant_scale must be provided"),
        (lambda: Static(weight_dtype=torch.int8), "float8"),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            make()
    unseen = _model()
    quantize_(unseen, Static(step="prepare"))
    with pytest.raises(ValueError, match="has seen no input"):
        quantize_(unseen, Static(step="convert"))


def test_prototype_float8_tensors() -> None:
    w, act = torch.randn(8, 16), torch.tensor([[0.03]])
    made = PrototypeFloat8Tensor.from_hp(w, act_quant_scale=act)
    assert isinstance(made, PrototypeFloat8Tensor)
    assert torch.equal(made.dequantize(), Float8Tensor.from_hp(w).dequantize())
    members = PrototypeFloat8Tensor.take(made)
    assert torch.equal(members["act_quant_scale"], act)
    again = PrototypeFloat8Tensor(**members)
    x = torch.randn(3, 16)
    assert torch.equal(F.linear(x, again), F.linear(x, made))
    assert isinstance(PrototypeFloat8Tensor.from_hp(w), Float8Tensor)
    kwargs = Static(act_quant_scale=0.03).get_act_quant_kwargs()
    found = prototype_float8_tensor._choose_quant_func_and_quantize_tensor(x, kwargs, act_quant_scale=act)
    assert torch.equal(found.dequantize(), _rounded(x, 0.03))
    with pytest.raises(AssertionError, match="needs"):
        PrototypeFloat8Tensor.from_hp(w, scale=act)
    with pytest.raises(NotImplementedError, match="output_act_quant_scale"):
        PrototypeFloat8Tensor.from_hp(w, output_act_quant_scale=act)
    with pytest.raises(ValueError, match="one for the tensor"):
        PrototypeFloat8Tensor.from_hp(w, act_quant_scale=torch.ones(2, 1))


# -- packed unsigned integers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, None)])
def test_uintx_configs(dtype: torch.dtype, dynamic: bool, bits: int, group: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48)).to(dtype)
    w = model[0].weight.detach().clone()
    config = prototype.Int8DynamicActivationUIntxWeightConfig if dynamic else prototype.UIntxWeightOnlyConfig
    quantize_(model, config(group_size=group, bit_width=bits))
    got = model[0].weight
    assert isinstance(got, AffineQuantizedTensor)
    assert isinstance(got, UIntxBitPackedTensor)
    assert (got.act is not None) == dynamic
    block = (1, group or 64)
    if bits == 4:
        codes, scale, zero, _ = quant_primitives._choose_qparams_and_quantize_affine_hqq(
            w, 4, group or 64, raw_output=True
        )
        spread = [p.float().repeat_interleave(group or 64, 1) for p in (scale, zero)]
        want = (codes.float() - spread[1]) * spread[0]
    else:
        scale, zero = quant_primitives.choose_qparams_affine(
            w, MappingType.SYMMETRIC, block, torch.int8, -128, 127, eps=1e-5
        )
        codes = quant_primitives.quantize_affine(w, block, scale, zero, torch.int8, -128, 127)
        want = codes.float() * scale.float().reshape(-1, 1)
    tolerance = {"rtol": 0, "atol": 4e-3} if dtype is torch.bfloat16 or bits == 4 else {}
    torch.testing.assert_close(got.dequantize().float(), want, **tolerance)
    x = torch.randn(5, 64, dtype=dtype)
    error = model(x) - F.linear(x, w, model[0].bias)
    assert error.float().norm().item() < (0.2 if bits == 4 else 0.02) * F.linear(x, w).float().norm().item()
    members = UIntxBitPackedTensor.take(got)
    assert (members["bit_width"], members["group_size"]) == (bits, group or 64)


def test_uintx_errors() -> None:
    for arguments, says in (
        ((128, 3), "bit_width must be 4 or 8, got 3"), ((48, 4), "group_size must be one of"),
        ((64, 8), "group_size must be None for bit_width=8"), ((64, 4, 12), "packing_bitwidth must be"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            prototype.UIntxWeightOnlyConfig(*arguments)
    with pytest.raises(AssertionError, match="does not divide"):
        quantize_(nn.Sequential(nn.Linear(48, 8)), prototype.UIntxWeightOnlyConfig(32))
    with pytest.raises(NotImplementedError, match="packed by gemlite"):
        UIntxBitPackedTensor(None, None, None, {}, 4, 32, torch.float16)


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [PerAxis(0), PerGroup(8)])
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
@pytest.mark.parametrize("fallback", [True, False])
def test_embeddings_are_replaced(granularity: Any, mapping: Any, fallback: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Embedding(20, 16)), nn.Linear(16, 4))
    same = nn.Sequential(copy.deepcopy(model[0][0]))
    found = api.EmbeddingQuantizer(torch.int4, granularity, mapping, use_fallback=fallback).quantize(model)
    assert found is model
    assert type(model[0][0]) is (api.QuantizedEmbeddingFallback if fallback else api.QuantizedEmbedding)
    quantize_(
        same,
        IntxWeightOnlyConfig(torch.int4, granularity, mapping),
        lambda module, name: isinstance(module, nn.Embedding),
    )
    ids = torch.randint(0, 20, (2, 3))
    assert torch.equal(model[0][0](ids), same[0](ids))
    assert type(model[1].weight) is nn.Parameter
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["0.0.embedding.weight"].dequantize(), same[0].weight.dequantize())


def test_embedding_errors() -> None:
    with pytest.raises(AssertionError, match="int1 to int8"):
        api.EmbeddingQuantizer(torch.uint4)
    with pytest.raises(ValueError, match="Unsupported granularity"):
        api.EmbeddingQuantizer(torch.int4, PerToken())
    with pytest.raises(ValueError, match=r"wrap this one in nn\.Sequential"):
        api.EmbeddingQuantizer().quantize(nn.Embedding(4, 8))
    with pytest.raises(KeyError, match="Parent module a not found"):
        api.get_parent_by_fqn(nn.Sequential(), "a.b")


class _Language(nn.Module):
    def __init__(self, shared: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 20, bias=bias)
        if shared:
            self.head.weight = self.table.weight
        else:
            self.head.weight.data.copy_(self.table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids)).relu())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_embeddings_share_one_quantized_weight(shared: bool, bias: bool) -> None:
    model, ids = _Language(shared, bias), torch.randint(0, 20, (2, 5))
    want = model(ids)
    api.TiedEmbeddingQuantizer(torch.int8, PerGroup(16), MappingType.SYMMETRIC).quantize(model)
    assert type(model.table) is api.QuantizedTiedEmbedding
    assert type(model.head) is api.QuantizedLinear
    weight = model.head.packed_weight
    assert model.table.unembedding_packed_weights is weight
    assert (model.head.n, model.head.k, model.head.group_size, model.head.bit_width) == (20, 32, 16, 8)
    assert torch.equal(model.table(ids), weight.dequantize()[ids])
    got = model(ids)
    assert got.shape == want.shape
    assert (got - want).norm().item() < 0.03 * want.norm().item()
    with pytest.raises(ValueError, match=r"inputs \[\.\., 32\]"):
        model.head(torch.randn(2, 31))


def test_ambiguous_ties_are_refused() -> None:
    model = _Language()
    model.second = nn.Linear(32, 20, bias=False)
    model.second.weight = model.table.weight
    with pytest.raises(ValueError, match="multiple candidate unembeddings"):
        api.TiedEmbeddingQuantizer().quantize(model)
    api.TiedEmbeddingQuantizer().quantize(model, {"table": "second"})
    assert type(model.second) is api.QuantizedLinear
    assert type(model.head) is nn.Linear
    with pytest.raises(AssertionError, match="Embedding body is not found"):
        api.TiedEmbeddingQuantizer().quantize(_Language(), {"body": "head"})
    other = _Language(shared=False)
    other.head.weight.data += 1
    with pytest.raises(AssertionError, match="does not share weights"):
        api.TiedEmbeddingQuantizer().quantize(other, {"table": "head"})


def test_lookup_tables_are_the_same_weights() -> None:
    from pennyweight.compat.torchao.quantization import Int8DynamicActivationIntxWeightConfig

    model, x = nn.Sequential(nn.Linear(32, 8)), torch.randn(3, 32)
    quantize_(model, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(16)))
    w = model[0].weight
    table = Int8LutTensor.from_intx_unpacked_to_int8_tensor(w)
    assert isinstance(table, Int8LutTensor)
    assert torch.equal(F.linear(x, table, model[0].bias), model(x))
    with pytest.raises(NotImplementedError, match="keep the bias"):
        Int8LutTensor.from_intx_unpacked_to_int8_tensor(w, bias=model[0].bias)
    only = nn.Sequential(nn.Linear(32, 8))
    quantize_(only, IntxWeightOnlyConfig(torch.int4, PerGroup(16)))
    with pytest.raises(AssertionError, match="INT8_ASYM_PER_TOKEN"):
        Int8LutTensor.from_intx_unpacked_to_int8_tensor(only[0].weight)
