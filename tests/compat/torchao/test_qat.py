"""torchao.quantization.qat: its tutorials' lines, on models that stay themselves."""

import copy

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.compat.torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from pennyweight.compat.torchao.quantization.prototype.qat import ComposableQATQuantizer as deep
from pennyweight.compat.torchao.quantization.qat import (
    ComposableQATQuantizer,
    FakeQuantizeConfig,
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    FakeQuantizerBase,
    Float8ActInt4WeightQATQuantizer,
    Float8FakeQuantizeConfig,
    FromIntXQuantizationAwareTrainingConfig,
    Int4WeightFakeQuantizeConfig,
    Int4WeightOnlyEmbeddingQATQuantizer,
    Int4WeightOnlyQATQuantizer,
    Int8DynActInt4WeightQATQuantizer,
    IntxFakeQuantizeConfig,
    QATConfig,
    QATStep,
    from_intx_quantization_aware_training,
    initialize_fake_quantizers,
    intx_quantization_aware_training,
)
from pennyweight.compat.torchao.quantization.qat.linear import disable_linear_fake_quant, enable_linear_fake_quant
from pennyweight.core.tensor import AffineQuantizedTensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(32, 64), nn.Linear(64, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.embedding(x)).relu())


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(x).detach()


X = torch.arange(20).reshape(4, 5)
ACT = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
PAIRS = {  # what a base config is in fake quantizers
    "8da4w": (
        Int8DynamicActivationInt4WeightConfig(group_size=32),
        ACT,
        IntxFakeQuantizeConfig(torch.int4, group_size=32),
    ),
    "intx": (IntxWeightOnlyConfig(torch.int2, PerGroup(16)), None, IntxFakeQuantizeConfig(torch.int2, PerGroup(16))),
    "channel": (IntxWeightOnlyConfig(torch.int4, PerAxis(0)), None, IntxFakeQuantizeConfig(torch.int4, "per_channel")),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("spelling", ["base", "configs"])
def test_prepare_and_convert(name: str, spelling: str) -> None:
    base, activation, weight = PAIRS[name]
    model = Net()
    deployed = copy.deepcopy(model)
    quantize_(deployed, base)
    if spelling == "base":
        quantize_(model, QATConfig(base, step="prepare"))
    else:
        quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step=QATStep.PREPARE))
    assert isinstance(model.first, FakeQuantizedLinear)
    assert type(model.embedding) is nn.Embedding
    assert torch.equal(model(X), deployed(X))
    y = train(model, X)
    quantize_(model, QATConfig(base, step=QATStep.CONVERT))
    assert isinstance(model.first.weight, AffineQuantizedTensor)
    assert type(model.first) is nn.Linear
    assert torch.equal(model(X), y)


def test_the_older_pair_gives_a_float_model_back() -> None:
    base, activation, weight = PAIRS["8da4w"]
    model = Net()
    quantize_(model, intx_quantization_aware_training(activation, weight))
    quantize_(model, intx_quantization_aware_training(None, weight), lambda m, fqn: isinstance(m, nn.Embedding))
    assert isinstance(model.embedding, FakeQuantizedEmbedding)
    y = train(model, X)
    quantize_(model, from_intx_quantization_aware_training())
    assert type(model.first) is nn.Linear
    assert type(model.embedding) is nn.Embedding
    assert type(model.first.weight) is nn.Parameter
    assert not torch.equal(model(X), y)
    quantize_(model, base)
    assert isinstance(model.first.weight, AffineQuantizedTensor)
    assert issubclass(from_intx_quantization_aware_training, FromIntXQuantizationAwareTrainingConfig)


def test_another_base_than_was_trained_for_is_told_of() -> None:
    model = Net()
    quantize_(model, QATConfig(weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32)))
    with pytest.warns(UserWarning, match="was trained for int4"):
        quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32), step="convert"))
    assert "uint4" in str(model.first.weight.spec)


def test_range_learning() -> None:
    model = Net()
    config = IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False, range_learning=True)
    quantize_(model, QATConfig(weight_config=config))
    initialize_fake_quantizers(model, (X,))
    scale = model.first.weight_scale.detach().clone()
    y = train(model, X)
    assert not torch.equal(model.first.weight_scale, scale)
    stored = model.first.weight_scale.detach().clone()
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(model(X), y)
    assert torch.equal(model.first.weight.scale, stored)


@pytest.mark.parametrize(
    "quantizer",
    [
        Int8DynActInt4WeightQATQuantizer(groupsize=32),
        Int4WeightOnlyQATQuantizer(groupsize=32),
        Float8ActInt4WeightQATQuantizer(group_size=32),
        ComposableQATQuantizer([Int8DynActInt4WeightQATQuantizer(32), Int4WeightOnlyEmbeddingQATQuantizer(32)]),
    ],
    ids=lambda q: type(q).__name__,
)
def test_two_step_quantizers(quantizer: object) -> None:
    model = Net()
    assert quantizer.prepare(model) is model
    y = train(model, X)
    quantizer.convert(model)
    assert torch.equal(model(X), y)
    assert isinstance(model.first.weight, AffineQuantizedTensor)
    whole = isinstance(quantizer, ComposableQATQuantizer)
    assert isinstance(model.embedding.weight, AffineQuantizedTensor) == whole
    assert deep is ComposableQATQuantizer


def test_what_a_group_does_not_divide_is_left_alone() -> None:
    model = Net()
    model.second = nn.Linear(60, 16)
    Int8DynActInt4WeightQATQuantizer(groupsize=32).prepare(model)
    assert isinstance(model.first, FakeQuantizedLinear)
    assert type(model.second) is nn.Linear


def test_switching_by_apply() -> None:
    model = Net()
    exact = model(X)
    quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32)))
    assert not torch.equal(model(X), exact)
    model.apply(disable_linear_fake_quant)
    assert torch.equal(model(X), exact)
    model.apply(enable_linear_fake_quant)
    assert not torch.equal(model(X), exact)


@pytest.mark.parametrize(
    "config",
    [
        IntxFakeQuantizeConfig(torch.int4, group_size=16),
        ACT,
        FakeQuantizeConfig(torch.int8, "per_channel"),
        Float8FakeQuantizeConfig(),
        Int4WeightFakeQuantizeConfig(16),
        Int4WeightFakeQuantizeConfig(16, torch.bfloat16),
    ],
    ids=repr,
)
def test_fake_quantizers(config: object) -> None:
    x = torch.randn(4, 32, requires_grad=True)
    quantizer = FakeQuantizerBase.from_config(config)
    y = quantizer(x)
    assert 0 < float((y - x).detach().abs().max()) < 0.5
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    quantizer.enabled = False
    assert quantizer(x) is x


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: IntxFakeQuantizeConfig(torch.int4), "must be set"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, "per_group"), "no `group_size`"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, "per_channel", group_size=32), "conflicts"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, "per_row"), "Unexpected granularity"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, PerAxis(1)), "axis=0"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=True), "per-token"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, group_size=32, range_learning=True), "range_learning"),
        (lambda: IntxFakeQuantizeConfig(torch.float32, group_size=32), "float32|Unsupported"),
        (lambda: QATConfig(weight_config=torch.int4), "FakeQuantizeConfigBase"),
        (lambda: QATConfig(weight_config=ACT), "per group and per channel"),
        (lambda: Float8FakeQuantizeConfig(hp_value_ub=1.0), "not supported"),
        (lambda: Int4WeightFakeQuantizeConfig(32, torch.float16), "activations are supported"),
    ],
)
def test_what_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()
