"""torchao.quantization.qat's modules: fake quantizers, layers, quantizers of two steps, and their states."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pennyweight_torchao.quantization import quantize_
from pennyweight_torchao.quantization.linear_quant_modules import (
    Int8DynActInt4WeightLinear,
    WeightOnlyInt4Linear,
    _replace_linear_8da4w,
    _replace_linear_int4,
)
from pennyweight_torchao.quantization.prototype.qat import ComposableQATQuantizer as deep
from pennyweight_torchao.quantization.prototype.qat import _module_swap_api
from pennyweight_torchao.quantization.qat import (
    ComposableQATQuantizer,
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    FakeQuantizer,
    FakeQuantizerBase,
    Float8FakeQuantizeConfig,
    Int4WeightOnlyEmbeddingQATQuantizer,
    Int4WeightOnlyQATQuantizer,
    Int8DynActInt4WeightQATQuantizer,
    IntxFakeQuantizeConfig,
    IntxFakeQuantizer,
    QATConfig,
)
from pennyweight_torchao.quantization.qat.embedding import Int4WeightOnlyEmbedding, Int4WeightOnlyQATEmbedding
from pennyweight_torchao.quantization.qat.fake_quantize_config import Int4WeightFakeQuantizeConfig
from pennyweight_torchao.quantization.qat.linear import (
    Int4WeightOnlyQATLinear,
    Int8DynActInt4WeightQATLinear,
    disable_4w_fake_quant,
    disable_8da4w_fake_quant,
    enable_4w_fake_quant,
    enable_8da4w_fake_quant,
)
from pennyweight_torchao.quantization.qat.utils import (
    _fake_quantize_per_channel_group,
    _fake_quantize_per_token,
    _get_qmin_qmax,
)

ACT = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
INT4 = IntxFakeQuantizeConfig(torch.int4, group_size=32)
X = torch.arange(20).reshape(4, 5)


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(32, 64, padding_idx=3), nn.Linear(64, 128, bias=bias)
        self.second, self.odd = nn.Linear(128, 32, bias=bias), nn.Linear(30, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.second(self.first(self.table(x)).relu())[..., :30])


def kinds(model: nn.Module) -> list[str]:
    return [type(m).__name__ for m in model.children()]


# -- fake quantizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [ACT, INT4, IntxFakeQuantizeConfig(torch.int8, "per_channel"), Float8FakeQuantizeConfig(),
     Int4WeightFakeQuantizeConfig(16), Int4WeightFakeQuantizeConfig(16, torch.bfloat16)],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantizers(config: Any, dtype: torch.dtype) -> None:
    x = torch.randn(4, 32).to(dtype).requires_grad_()
    quantizer = FakeQuantizerBase.from_config(config)
    assert repr(quantizer) == f"FakeQuantizer({config!r})"
    y = quantizer(x)
    assert y.dtype is dtype
    assert 0 < float((y - x).detach().abs().max()) < 0.5
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert (x.grad != 0).float().mean() > 0.8
    quantizer.enabled = False
    assert quantizer(x) is x
    assert not quantizer.state_dict()
    assert torch.equal(copy.deepcopy(quantizer)(x), x)


def test_tokens_can_be_symmetric() -> None:
    """torchao refuses the default of its own config when a token comes."""
    x = torch.randn(3, 5, 32)
    quantizer = FakeQuantizerBase.from_config(IntxFakeQuantizeConfig(torch.int8, "per_token"))
    y = quantizer(x)
    assert not quantizer.zero_point.any()
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    torch.testing.assert_close(y, (x * (1 / scale)).round().clamp(-128, 127) * scale)


def test_scales_are_kept_unless_dynamic() -> None:
    quantizer = IntxFakeQuantizer(IntxFakeQuantizeConfig(torch.int4, group_size=16, is_dynamic=False))
    assert quantizer.scale is None
    w = torch.randn(4, 32)
    quantizer(w)
    scale = quantizer.scale
    assert scale.shape == (4, 2)
    quantizer(w * 10)
    assert quantizer.scale is scale
    with pytest.warns(UserWarning, match="'FakeQuantizer' is deprecated"):
        old = FakeQuantizer(INT4)
    assert isinstance(quantizer, FakeQuantizer)
    assert isinstance(old, IntxFakeQuantizer)
    with pytest.raises(ValueError, match="Unknown config type"):
        FakeQuantizerBase.from_config("int4")
    with pytest.raises(AssertionError, match="expected a matrix"):
        FakeQuantizerBase.from_config(Int4WeightFakeQuantizeConfig(16))(w[0])


def test_functions() -> None:
    assert (_get_qmin_qmax(4), _get_qmin_qmax(3, False)) == ((-8, 7), (0, 7))
    x = torch.randn(2, 3, 8)
    scale, zero = torch.rand(2, 3, 1) + 0.01, torch.randint(-9, 9, (2, 3, 1)).float()
    y = _fake_quantize_per_token(x, scale, zero, -128, 127)
    torch.testing.assert_close(y, ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale)
    with pytest.raises(AssertionError, match="num_tokens: 6"):
        _fake_quantize_per_token(x, scale[0], zero, -128, 127)
    w = torch.randn(4, 8, requires_grad=True)
    scale, zero = torch.full((4, 2), 0.1), torch.zeros(4, 2)
    y = _fake_quantize_per_channel_group(w, scale, zero, -8, 7, 4)
    torch.testing.assert_close(y, (w / 0.1).round().clamp(-8, 7) * 0.1)
    (grad,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(grad, ((w / 0.1).round() == (w / 0.1).round().clamp(-8, 7)).float())
    for bad, says in (((w[0], 4), "matrix"), ((w, 1), "greater than 1"), ((w, 3), "does not divide")):
        with pytest.raises(AssertionError, match=says):
            _fake_quantize_per_channel_group(bad[0], scale, zero, -8, 7, bad[1])


# -- layers ------------------------------------------------------------------------------------------------------------


def test_linear_from_and_to() -> None:
    plain = nn.Linear(64, 8).eval()
    layer = FakeQuantizedLinear.from_linear(plain, ACT, INT4)
    assert layer.weight is plain.weight
    assert layer.bias is plain.bias
    assert not layer.training
    assert list(layer.state_dict()) == ["weight", "bias"]
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert back.weight is plain.weight
    assert not back.training
    assert FakeQuantizedLinear(64, 8).bias is None
    bare = FakeQuantizedLinear.from_linear(plain)
    x = torch.randn(2, 64)
    assert torch.equal(bare(x), plain(x))
    with torch.device("meta"):
        meta = FakeQuantizedLinear.from_linear(nn.Linear(64, 8), ACT, INT4)
    assert meta.weight.is_meta
    assert meta(torch.empty(2, 64, device="meta")).shape == (2, 8)


@pytest.mark.parametrize("deployed", [False, True])
def test_layers_survive_copies_pickles_and_casts(deployed: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    model[0] = FakeQuantizedLinear.from_linear(model[0], ACT, INT4)
    if deployed:
        model[0].deploy()
    x = torch.randn(3, 64)
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)
    half = copy.deepcopy(model).bfloat16()
    assert half(x.bfloat16()).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x.requires_grad_())
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32
    assert x.grad.dtype is torch.float32


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled() -> None:
    """Traces compute F.linear of the fake-quantized values: the deployed ones, up to the order of sums."""
    model = nn.Sequential(nn.Linear(64, 8))
    quantize_(model, QATConfig(activation_config=ACT, weight_config=INT4))
    x = torch.randn(3, 64)
    compiled = torch.compile(model, backend="aot_eager")
    y, told = compiled(x), model(x)
    torch.testing.assert_close(y, told, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(y.sin().sum(), model[0].weight)
    torch.testing.assert_close(grad, torch.autograd.grad(told.sin().sum(), model[0].weight)[0], rtol=1e-4, atol=1e-5)


def test_embedding_from_and_to() -> None:
    plain = nn.Embedding(16, 32, padding_idx=2, max_norm=5.0)
    layer = FakeQuantizedEmbedding.from_embedding(plain, IntxFakeQuantizeConfig(torch.int4, group_size=16))
    assert layer.weight is plain.weight
    assert (layer.padding_idx, layer.max_norm) == (2, 5.0)
    back = layer.to_embedding()
    assert type(back) is nn.Embedding
    assert (back.weight is plain.weight, back.padding_idx, back.max_norm) == (True, 2, 5.0)
    free = FakeQuantizedEmbedding(16, 32, weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=16))
    ids = torch.tensor([[1, 2], [2, 15]])
    assert torch.equal(free(ids), free.weight_fake_quantizer(free.weight)[ids])
    free(ids).sum().backward()
    assert free.weight.grad[[1, 2, 15]].any(-1).all()
    assert not free.weight.grad[[0, 3, 14]].any()
    assert torch.equal(FakeQuantizedEmbedding.from_embedding(plain)(ids), plain(ids))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_8da4w_layer_computes_as_its_conversion(precision: torch.dtype) -> None:
    layer = Int8DynActInt4WeightQATLinear(64, 8, True, groupsize=32, precision=precision, scales_precision=precision)
    assert layer.weight.dtype is precision
    assert layer.weight_fake_quantizer.config.scale_precision is precision
    assert layer.activation_fake_quantizer.config.scale_precision is torch.float32
    x = torch.randn(3, 64, dtype=precision)
    model = Int8DynActInt4WeightQATQuantizer(32).convert(nn.Sequential(copy.deepcopy(layer)))
    new = model[0]
    assert type(new) is Int8DynActInt4WeightLinear
    assert torch.equal(new(x), layer(x))
    assert {n: t.dtype for n, t in new.state_dict().items()} == {
        "weight": torch.int8, "scales": precision, "zeros": precision, "bias": precision,
    }  # fmt: skip
    values = new.weight.float() * new.scales.float().repeat_interleave(32, 1)
    torch.testing.assert_close(values, layer.weight_fake_quantizer(layer.weight).float(), rtol=1e-2, atol=1e-3)


def test_4w_layer_computes_as_its_conversion() -> None:
    layer = Int4WeightOnlyQATLinear(64, 16, groupsize=32, inner_k_tiles=2)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    new = Int4WeightOnlyQATQuantizer(32, 2).convert(nn.Sequential(copy.deepcopy(layer)))[0]
    assert type(new) is WeightOnlyInt4Linear
    assert torch.equal(new(x), layer(x))
    assert list(new.state_dict()) == ["weight", "scales_and_zeros"]
    with pytest.raises(ValueError, match="Padding for QAT 4w"):
        Int4WeightOnlyQATLinear(48, 16, groupsize=32)
    with pytest.raises(AssertionError, match="only bf16"):
        Int4WeightOnlyQATLinear(64, 16, groupsize=32, inner_k_tiles=2, scales_precision=torch.float32)


def test_int4_embedding() -> None:
    layer = Int4WeightOnlyQATEmbedding(16, 32, padding_idx=1, group_size=16)
    ids = torch.tensor([[1, 2], [2, 15]])
    new = Int4WeightOnlyEmbeddingQATQuantizer().convert(nn.Sequential(copy.deepcopy(layer)))[0]
    assert type(new) is Int4WeightOnlyEmbedding
    assert torch.equal(new(ids), layer(ids))
    assert {n: t.dtype for n, t in new.state_dict().items()} == {
        "weight": torch.int8, "scale": torch.float32, "zero_point": torch.int32,
    }  # fmt: skip
    values = new.weight * new.scale.repeat_interleave(16, 1)
    assert torch.equal(new(ids), values[ids])
    layer.disable_fake_quant()
    assert torch.equal(layer(ids), layer.weight[ids])
    layer.enable_fake_quant()
    assert not torch.equal(layer(ids), layer.weight[ids])
    for norm_type in (1.0, 2.0):
        limited = Int4WeightOnlyEmbedding(16, 32, max_norm=1.0, norm_type=norm_type, group_size=16)
        limited.load_state_dict(new.state_dict())
        told = torch.nn.functional.embedding(ids, values.clone(), max_norm=1.0, norm_type=norm_type)
        torch.testing.assert_close(limited(ids), told)
    with pytest.raises(IndexError):
        new(torch.tensor([16]))


# -- quantizers --------------------------------------------------------------------------------------------------------

QUANTIZERS = {
    "8da4w": (
        lambda: Int8DynActInt4WeightQATQuantizer(32),
        ["Embedding", "Int8DynActInt4WeightQATLinear", "Int8DynActInt4WeightQATLinear", "Linear"],
        ["Embedding", "Int8DynActInt4WeightLinear", "Int8DynActInt4WeightLinear", "Linear"],
    ),
    "embedding": (
        lambda: Int4WeightOnlyEmbeddingQATQuantizer(16),
        ["Int4WeightOnlyQATEmbedding", "Linear", "Linear", "Linear"],
        ["Int4WeightOnlyEmbedding", "Linear", "Linear", "Linear"],
    ),
    "both": (
        lambda: ComposableQATQuantizer([Int8DynActInt4WeightQATQuantizer(32), Int4WeightOnlyEmbeddingQATQuantizer(16)]),
        ["Int4WeightOnlyQATEmbedding", "Int8DynActInt4WeightQATLinear", "Int8DynActInt4WeightQATLinear", "Linear"],
        ["Int4WeightOnlyEmbedding", "Int8DynActInt4WeightLinear", "Int8DynActInt4WeightLinear", "Linear"],
    ),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_two_steps(name: str) -> None:
    make, prepared, converted = QUANTIZERS[name]
    model, quantizer = Net(), make()
    names = list(model.state_dict())
    assert quantizer.prepare(model) is model
    assert kinds(model) == prepared
    assert list(model.state_dict()) == names  # checkpoints of the float model load, and the other way round
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    y, state = model(X), model.state_dict()
    assert quantizer.convert(model) is model
    assert kinds(model) == converted
    assert torch.equal(model(X), y)
    again = Net()
    again.load_state_dict(state)
    again = quantizer.convert(quantizer.prepare(again))
    assert torch.equal(again(X), y)
    again.load_state_dict(model.state_dict())
    assert deep is ComposableQATQuantizer


def test_switches() -> None:
    """torchtune's delayed start: off by model.apply, and on after some steps."""
    model = Net()
    exact = model(X)
    Int8DynActInt4WeightQATQuantizer(32).prepare(model)
    y = model(X)
    model.apply(disable_4w_fake_quant)
    assert torch.equal(model(X), y)
    model.apply(disable_8da4w_fake_quant)
    assert not model.first.activation_fake_quantizer.enabled
    assert torch.equal(model(X), exact)
    model.apply(enable_8da4w_fake_quant)
    assert torch.equal(model(X), y)
    four = nn.Sequential(nn.Linear(64, 16, bias=False)).bfloat16()
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    exact = four(x)
    Int4WeightOnlyQATQuantizer(32, 2).prepare(four)
    four.apply(disable_4w_fake_quant)
    assert torch.equal(four(x), exact)
    four.apply(enable_4w_fake_quant)
    assert not torch.equal(four(x), exact)


def test_groups_and_padding() -> None:
    with pytest.raises(ValueError, match=r"in_features \(30\)"):
        Int8DynActInt4WeightQATQuantizer(32, padding_allowed=True).prepare(Net())
    with pytest.raises(ValueError, match="Padding for QAT 4w"):
        Int4WeightOnlyQATQuantizer(32).prepare(nn.Sequential(nn.Linear(48, 16, bias=False)))
    with pytest.raises(AssertionError, match="groupsize must be"):
        Int4WeightOnlyQATQuantizer(31)
    with pytest.raises(AssertionError, match="inner_k_tiles must be"):
        Int4WeightOnlyQATQuantizer(32, 3)
    assert _module_swap_api.Int8DynActInt4WeightQATQuantizerModuleSwap is Int8DynActInt4WeightQATQuantizer
    assert _module_swap_api.enable_4w_fake_quant_module_swap is enable_4w_fake_quant


def test_meta_models() -> None:
    with torch.device("meta"):
        model = Net()
    quantizer = ComposableQATQuantizer([Int8DynActInt4WeightQATQuantizer(32), Int4WeightOnlyEmbeddingQATQuantizer(16)])
    quantizer.prepare(model)
    assert all(p.is_meta for p in model.parameters())
    real = Net()
    model.load_state_dict(real.state_dict(), assign=True)
    quantizer.prepare(real)
    assert torch.equal(model(X), real(X))


def test_replacing_layers() -> None:
    model = Net(bias=False)
    weight = model.first.weight
    _replace_linear_8da4w(model, 64, False, torch.float32, torch.float32, Int8DynActInt4WeightQATLinear, True)
    assert model.first.weight is weight
    assert kinds(model)[1:] == ["Int8DynActInt4WeightQATLinear", "Int8DynActInt4WeightQATLinear", "Linear"]
    model = Net()
    _replace_linear_8da4w(model, 128, False, torch.float32, torch.float32, Int8DynActInt4WeightLinear)
    assert kinds(model)[1:] == ["Linear", "Int8DynActInt4WeightLinear", "Linear"]
    model = Net(bias=False).bfloat16()
    weight = model.second.weight
    skip = lambda w: w.shape[0] == 128  # noqa: E731
    _replace_linear_int4(model, 32, 2, False, skip, linear_class=Int4WeightOnlyQATLinear, copy_weights=True)
    assert kinds(model)[1:] == ["Linear", "Int4WeightOnlyQATLinear", "Linear"]
    assert model.second.weight is weight
    model = Net(bias=False)
    _replace_linear_int4(model, 64, 8, False)
    assert kinds(model)[1:] == ["Linear", "WeightOnlyInt4Linear", "Linear"]
