"""torchao.quantization.qat in quantize_: configs, prepared layers, and what they are converted to."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight_torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerRow,
    PerToken,
    quantize_,
)
from pennyweight_torchao.quantization.qat import (
    FakeQuantizeConfig,
    FakeQuantizedEmbedding,
    FakeQuantizedLinear,
    Float8FakeQuantizeConfig,
    FromIntXQuantizationAwareTrainingConfig,
    Int8DynActInt4WeightQATQuantizer,
    IntxFakeQuantizeConfig,
    IntXQuantizationAwareTrainingConfig,
    QATConfig,
    QATStep,
    from_intx_quantization_aware_training,
    initialize_fake_quantizers,
    intx_quantization_aware_training,
)
from pennyweight_torchao.quantization.qat.fake_quantize_config import (
    Int4WeightFakeQuantizeConfig,
    _infer_fake_quantize_configs,
)
from pennyweight_torchao.quantization.qat.linear import disable_linear_fake_quant, enable_linear_fake_quant

ACT = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
INT4 = IntxFakeQuantizeConfig(torch.int4, group_size=32)


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


def is_embedding(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Embedding)


X = torch.arange(20).reshape(4, 5)
PAIRS = {  # what a base config is in fake quantizers
    "8da4w": (Int8DynamicActivationInt4WeightConfig(group_size=32), ACT, INT4),
    "8daXw": (
        Int8DynamicActivationIntxWeightConfig(torch.int3, PerAxis(0)),
        ACT,
        IntxFakeQuantizeConfig(torch.int3, "per_channel"),
    ),
    "intx": (IntxWeightOnlyConfig(torch.int2, PerGroup(16)), None, IntxFakeQuantizeConfig(torch.int2, PerGroup(16))),
    "channel": (IntxWeightOnlyConfig(torch.int4, PerAxis(0)), None, IntxFakeQuantizeConfig(torch.int4, "per_channel")),
    "float8": (
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
        Float8FakeQuantizeConfig(),
        Float8FakeQuantizeConfig(),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("spelling", ["base", "configs"])
def test_prepare_and_convert(name: str, spelling: str) -> None:
    """The prepared model computes as the deployed one does, bit for bit, before and after training."""
    base, activation, weight = PAIRS[name]
    model = Net()
    deployed = copy.deepcopy(model)
    quantize_(deployed, base)
    if spelling == "base":
        quantize_(model, QATConfig(base, step="Prepare"))
    else:
        quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step=QATStep.PREPARE))
    assert type(model.first) is FakeQuantizedLinear
    assert (model.first.activation_fake_quantizer is None) == (activation is None)
    assert type(model.embedding) is nn.Embedding
    assert torch.equal(model(X), deployed(X))
    y = train(model, X)
    assert not torch.equal(y, deployed(X))
    quantize_(model, QATConfig(base, step="CONVERT"))
    assert isinstance(model.first.weight, AffineQuantizedTensor)
    assert type(model.first) is nn.Linear
    assert torch.equal(model(X), y)


@pytest.mark.parametrize("base", [Int4WeightOnlyConfig(32), Float8DynamicActivationInt4WeightConfig(group_size=32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_base_configs(base: Any, dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    deployed = copy.deepcopy(model)
    quantize_(deployed, base)
    quantize_(model, QATConfig(base, step="prepare"))
    assert type(model.first.weight_fake_quantizer.config) is Int4WeightFakeQuantizeConfig
    assert torch.equal(model(X), deployed(X))
    y = train(model, X)
    quantize_(model, QATConfig(base, step="convert"))
    assert torch.equal(model(X), y)


def test_gradients_of_deployed_layers_are_those_of_the_fake_quantizers() -> None:
    x = torch.randn(3, 5, 64)
    plain = nn.Linear(64, 16)
    by_hand = FakeQuantizedLinear.from_linear(copy.deepcopy(plain), ACT, INT4)
    model = nn.Sequential(copy.deepcopy(plain))
    quantize_(model, QATConfig(activation_config=ACT, weight_config=INT4))
    assert by_hand.deployment is None
    assert model[0].deployment is not None
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    ys = [layer(t) for layer, t in zip((by_hand, model), inputs, strict=True)]
    torch.testing.assert_close(*ys, rtol=1e-5, atol=1e-5)
    told = torch.nn.functional.linear(
        by_hand.activation_fake_quantizer(x), by_hand.weight_fake_quantizer(plain.weight), plain.bias
    )
    assert torch.equal(ys[0], told)
    for y in ys:
        y.sin().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(by_hand.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
    # the largest of a group, if positive, is at 7.5 steps: it rounds to 8, mostly, and is clamped
    groups = plain.weight.view(16, 2, 32)
    largest = (groups == groups.abs().amax(-1, keepdim=True)).view(16, 64)
    zero = by_hand.weight.grad == 0
    assert 0 < int(zero.sum()) <= int(largest.sum())
    assert not zero[~largest].any()


def test_a_changed_quantizer_is_computed_as_it_says() -> None:
    """A layer gives its deployed values only as long as its fake quantizers are what it will be converted to."""
    x = torch.randn(3, 64)
    model = nn.Sequential(nn.Linear(64, 16))
    quantize_(model, QATConfig(Int8DynamicActivationInt4WeightConfig(group_size=32)))
    layer = model[0]
    layer.activation_fake_quantizer.enabled = False
    told = torch.nn.functional.linear(x, layer.weight_fake_quantizer(layer.weight), layer.bias)
    assert torch.equal(layer(x), told)
    layer.activation_fake_quantizer.enabled = True
    layer.weight_fake_quantizer.config.group_size = 16
    told = torch.nn.functional.linear(
        layer.activation_fake_quantizer(x), layer.weight_fake_quantizer(layer.weight), layer.bias
    )
    assert torch.equal(layer(x), told)
    layer.weight_fake_quantizer = nn.Identity()
    told = torch.nn.functional.linear(layer.activation_fake_quantizer(x), layer.weight, layer.bias)
    assert torch.equal(layer(x), told)


def test_an_input_alone() -> None:
    model = Net()
    quantize_(model, QATConfig(activation_config=ACT))
    assert model.first.weight_fake_quantizer is None
    x = torch.randn(2, 64)
    told = torch.nn.functional.linear(model.first.activation_fake_quantizer(x), model.first.weight, model.first.bias)
    assert torch.equal(model.first(x), told)


def test_the_older_pair_gives_a_float_model_back() -> None:
    base, activation, weight = PAIRS["8da4w"]
    model = Net()
    bias = model.first.bias
    with pytest.warns(UserWarning, match="'intx_quantization_aware_training' is deprecated"):
        quantize_(model, intx_quantization_aware_training(activation, weight))
    with pytest.warns(UserWarning, match="is deprecated"):
        quantize_(model, IntXQuantizationAwareTrainingConfig(weight_config=weight), is_embedding)
    assert type(model.embedding) is FakeQuantizedEmbedding
    y = train(model, X)
    with pytest.warns(UserWarning, match="is deprecated"):
        back = from_intx_quantization_aware_training()
    quantize_(model, back, lambda m, fqn: isinstance(m, (nn.Linear, nn.Embedding)))
    assert [type(m) for m in model.children()] == [nn.Embedding, nn.Linear, nn.Linear]
    assert type(model.first.weight) is nn.Parameter
    assert model.first.bias is bias
    assert not torch.equal(model(X), y)
    quantize_(model, base)
    assert isinstance(model.first.weight, AffineQuantizedTensor)
    assert issubclass(from_intx_quantization_aware_training, FromIntXQuantizationAwareTrainingConfig)


def test_embeddings() -> None:
    base = IntxWeightOnlyConfig(torch.int4, PerGroup(16))
    model = Net()
    with pytest.raises(ValueError, match="Activation fake quantization is not supported for embedding"):
        quantize_(model, QATConfig(activation_config=ACT, weight_config=INT4), is_embedding)
    with pytest.raises(ValueError, match="does not have QAT support"):
        quantize_(nn.Sequential(nn.ReLU()), QATConfig(weight_config=INT4), lambda m, fqn: isinstance(m, nn.ReLU))
    assert type(model.embedding) is nn.Embedding
    quantize_(model, QATConfig(base), is_embedding)
    assert type(model.embedding) is FakeQuantizedEmbedding
    y = train(model, X)
    quantize_(model, QATConfig(base, step="convert"), is_embedding)
    assert isinstance(model.embedding.weight, AffineQuantizedTensor)
    assert torch.equal(model(X), y)


def test_by_name() -> None:
    model = Net()
    prepare = FqnToConfig({"first": QATConfig(PAIRS["intx"][0]), "second": QATConfig(weight_config=INT4)})
    quantize_(model, prepare, None)
    kinds = [type(m) for m in model.children()]
    assert kinds == [nn.Embedding, FakeQuantizedLinear, FakeQuantizedLinear]
    quantize_(model, FqnToConfig({"second": QATConfig(step="convert")}), None)
    assert [type(m) for m in model.children()] == [nn.Embedding, FakeQuantizedLinear, nn.Linear]


@pytest.mark.parametrize("where", ["base", "module", "group"])
def test_what_torchao_refuses_is_prepared_by_our_own(where: str) -> None:
    """Base configs without torchao's fake quantizers, other modules, and groups that do not divide."""
    model: nn.Module = nn.Sequential(nn.Linear(40, 24))
    base: Any = {"base": Int8WeightOnlyConfig()}.get(where, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))
    x, pick = torch.randn(2, 40), None
    if where == "module":
        model, x = nn.Sequential(nn.Conv2d(32, 8, 1)), torch.randn(2, 32, 3, 3)
        pick = lambda m, fqn: isinstance(m, nn.Conv2d)  # noqa: E731
    deployed, more = copy.deepcopy(model), {} if pick is None else {"filter_fn": pick}
    quantize_(deployed, base, **more)
    quantize_(model, QATConfig(base), **more)
    assert torch.equal(model(x), deployed(x))
    quantize_(model, QATConfig(base, step="convert"), **more)
    assert torch.equal(model(x), deployed(x))
    assert isinstance(model[0].weight, AffineQuantizedTensor)


def test_another_base_than_was_trained_for_is_told_of() -> None:
    model = Net()
    quantize_(model, QATConfig(weight_config=INT4))
    with pytest.warns(UserWarning, match="was trained for int4"):
        quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32), step="convert"))
    assert "uint4" in str(model.first.weight.spec)


def test_a_prepared_layer_is_not_quantized_in_place() -> None:
    model = Net()
    quantize_(model, QATConfig(weight_config=INT4))
    with pytest.raises(ValueError, match="prepared for quantization-aware training"):
        quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match="no prepared module"):
        quantize_(Net(), QATConfig(step="convert"))


@pytest.mark.parametrize("symmetric", [True, False])
def test_range_learning(symmetric: bool) -> None:
    model = Net()
    config = IntxFakeQuantizeConfig(
        torch.int4, group_size=32, is_symmetric=symmetric, is_dynamic=False, range_learning=True,
        zero_point_precision=torch.float32,
    )  # fmt: skip
    quantize_(model, QATConfig(weight_config=config))
    with pytest.raises(ValueError, match="must be initialized for range learning"):
        model(X)
    initialize_fake_quantizers(model, (X,))
    quantizer = model.first.weight_fake_quantizer
    names = {"weight", "bias", "weight_fake_quantizer.scale"}
    names |= set() if symmetric else {"weight_fake_quantizer.zero_point"}
    assert {n for n, _ in model.first.named_parameters()} == names
    scale = quantizer.scale.detach().clone()
    y = train(model, X)
    assert not torch.equal(quantizer.scale, scale)
    fresh = Net()
    quantize_(fresh, QATConfig(weight_config=config))
    initialize_fake_quantizers(fresh, (X,))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(X), y)
    learned = quantizer.scale.detach().clone()
    with pytest.raises(ValueError, match="convert with the config that they were trained for"):
        quantize_(copy.deepcopy(model), QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(16)), step="convert"))
    quantize_(model, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32)), step="convert"))
    assert torch.equal(model.first.weight.scale, learned)
    torch.testing.assert_close(model(X), y, rtol=1e-4, atol=1e-4)


def test_switching_by_apply() -> None:
    model = Net()
    exact = model(X)
    quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32)))
    assert not torch.equal(model(X), exact)
    model.apply(disable_linear_fake_quant)
    assert not model.first.weight_fake_quantizer.enabled
    assert torch.equal(model(X), exact)
    model.apply(enable_linear_fake_quant)
    assert not torch.equal(model(X), exact)
    ours = Net()
    pw.quantize_(ours, pw.QATConfig(Int8WeightOnlyConfig()))
    before = ours(X)
    ours.apply(disable_linear_fake_quant)
    assert not torch.equal(ours(X), before)


# -- configs -----------------------------------------------------------------------------------------------------------


def test_fields_can_be_read_and_assigned() -> None:
    config = IntxFakeQuantizeConfig(torch.int8, "per_token")
    assert config.is_symmetric
    assert config.granularity == PerToken()
    assert config.mapping_type is MappingType.SYMMETRIC
    with pytest.raises(ValueError, match="`group_size` is undefined"):
        _ = config.group_size
    config.group_size, config.is_symmetric = 64, False
    assert config == IntxFakeQuantizeConfig(torch.int8, PerGroup(64), MappingType.ASYMMETRIC)
    assert "dtype=torch.int8, granularity=PerGroup(group_size=64)" in repr(config)
    qat = QATConfig(Int8WeightOnlyConfig())
    assert (qat.step, qat.activation_config) == ("prepare", None)
    qat.base_config, qat.step = None, QATStep.CONVERT
    model = Net()
    quantize_(model, QATConfig(weight_config=INT4))
    quantize_(model, qat)
    assert type(model.first) is nn.Linear


def test_the_older_name_is_both() -> None:
    with pytest.warns(UserWarning, match="'FakeQuantizeConfig' is deprecated"):
        old = FakeQuantizeConfig(torch.int4, group_size=32)
    assert isinstance(old, IntxFakeQuantizeConfig)
    assert isinstance(INT4, FakeQuantizeConfig)
    assert not isinstance(Float8FakeQuantizeConfig(), FakeQuantizeConfig)


def test_fake_quantizers_of_base_configs() -> None:
    for base, activation, weight in list(PAIRS.values())[2:]:
        found = _infer_fake_quantize_configs(base)
        if isinstance(weight, IntxFakeQuantizeConfig):
            weight = copy.copy(weight)
            weight.scale_precision = None  # scales in the weight's dtype
        assert found == (activation, weight)
    with pytest.raises(ValueError, match="Unexpected base config"):
        _infer_fake_quantize_configs(Int8WeightOnlyConfig())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: IntxFakeQuantizeConfig(torch.int4), "must be set"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, "per_group"), "no `group_size`"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, "per_channel", group_size=32), "conflicts"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, "per_row"), "Unexpected granularity"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, 32), "unexpected type"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, PerRow()), "is not supported"),
        (lambda: IntxFakeQuantizeConfig(torch.int8, PerAxis(1)), "axis=0"),
        (
            lambda: IntxFakeQuantizeConfig(torch.int8, PerToken(), MappingType.SYMMETRIC, is_symmetric=False),
            "Cannot set both",
        ),
        (lambda: IntxFakeQuantizeConfig(torch.int8, PerToken(), MappingType.SYMMETRIC_NO_CLIPPING_ERR), "MappingType"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, group_size=32, range_learning=True), "range_learning"),
        (lambda: IntxFakeQuantizeConfig(torch.int4, group_size=32, zero_point_domain=None), "ZeroPointDomain.NONE"),
        (lambda: IntxFakeQuantizeConfig(torch.float32, group_size=32), "Unsupported dtype"),
        (lambda: QATConfig(weight_config=torch.int4), "FakeQuantizeConfigBase"),
        (lambda: QATConfig(INT4), "was passed as `base_config`"),
        (QATConfig, "Must specify"),
        (lambda: QATConfig(Int8WeightOnlyConfig(), weight_config=INT4), "both `base_config` and `weight_config`"),
        (lambda: QATConfig(Int8WeightOnlyConfig(), ACT), "both `base_config` and `activation_config`"),
        (lambda: QATConfig(weight_config=INT4, step="convert"), "in the convert step"),
        (lambda: QATConfig(INT4.dtype), "must be a config"),
        (lambda: QATConfig(Int8WeightOnlyConfig(), step="later"), "`step` must be one of"),
        (lambda: Float8FakeQuantizeConfig(torch.int8), "is not a float8 dtype"),
        (lambda: Float8FakeQuantizeConfig(granularity=PerRow), "instead of the class"),
        (lambda: Float8FakeQuantizeConfig(granularity=PerGroup(32)), "Expected PerRow or PerTensor"),
        (lambda: Int4WeightFakeQuantizeConfig(32, torch.float16), "activation are supported"),
        (
            lambda: FakeQuantizedLinear(40, 8, weight_config=INT4),
            r"in_features \(40\) % group_size \(32\) must be == 0",
        ),
    ],
)
def test_what_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


# -- around it ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["config", "quantizer"])
def test_fused_transformer_layers_call_their_prepared_ones(how: str) -> None:
    """torch's fast path for inference reads float weights, past the fake quantizers; torchao lets it."""
    base = IntxWeightOnlyConfig(torch.int4, PerGroup(32))
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    quantizer = Int8DynActInt4WeightQATQuantizer(32)
    quantize_(model, QATConfig(base)) if how == "config" else quantizer.prepare(model)
    y = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)
        if how == "config":
            quantize_(model, QATConfig(base, step="convert"))
        else:
            quantizer.convert(model)
        torch.testing.assert_close(model(x), y, rtol=1e-5, atol=1e-5)


def test_transforms_of_torch_func() -> None:
    model = nn.Sequential(nn.Linear(64, 8))
    quantize_(model, QATConfig(PAIRS["8da4w"][0]))
    x = torch.randn(3, 64)
    told = model(x)
    told.sin().sum().backward()
    state = {n: p.detach() for n, p in model.named_parameters()}
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sin().sum())(state)
    torch.testing.assert_close(found["0.weight"], model[0].weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(model)(x), told, rtol=1e-5, atol=1e-5)


def test_other_settings() -> None:
    """Inference mode before training, double weights, tied weights, a dry run."""
    base = PAIRS["intx"][0]
    model = nn.Sequential(nn.Linear(64, 8))
    assert "QATConfig" in str(quantize_(model, QATConfig(base), dry_run=True))
    assert type(model[0]) is nn.Linear
    quantize_(model, QATConfig(base))
    x = torch.randn(3, 64)
    with torch.inference_mode():
        y = model(x)
    assert torch.equal(model(x), y)
    model(x).sum().backward()
    double = nn.Sequential(nn.Linear(64, 8).double())
    quantize_(double, QATConfig(base))
    assert double(x.double()).dtype is torch.float64
    tied = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 16, bias=False))
    tied[1].weight = tied[0].weight
    both = lambda m, fqn: isinstance(m, (nn.Linear, nn.Embedding))  # noqa: E731
    quantize_(tied, QATConfig(base), both)
    assert tied[0].weight is tied[1].weight
    ids = torch.arange(5)
    y = tied(ids)
    quantize_(tied, QATConfig(base, step="convert"), both)
    assert torch.equal(tied(ids), y)
    with pytest.raises(ValueError, match=r"wrap the model in nn\.Sequential"):
        quantize_(nn.Linear(64, 8), QATConfig(base))


def test_starting_from_a_solver() -> None:
    """pennyweight's own preparation holds the codes that a solver chose."""
    for config in (QATConfig(PAIRS["intx"][0]), QATConfig(weight_config=PAIRS["intx"][2])):
        model = nn.Sequential(nn.Linear(64, 8))
        solved = copy.deepcopy(model)
        x = torch.randn(32, 64)
        quantize_(solved, PAIRS["intx"][0], calibration=[x], algorithm="gptq")
        quantize_(model, config, calibration=[x], algorithm="gptq")
        torch.testing.assert_close(model(x), solved(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="need a base_config"):
        quantize_(model, QATConfig(activation_config=ACT), calibration=[x], algorithm="gptq")
