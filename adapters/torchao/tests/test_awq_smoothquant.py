"""AWQ and SmoothQuant: torchao's numbers, the two-call flow, observers, state dicts, pre-scaled weights."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.io.codecs.torchao.flattened_safetensors import flatten_tensor_state_dict, unflatten_tensor_state_dict
from pennyweight.io.codecs.torchao.tensor_class import with_pre_scale
from pennyweight_torchao.algorithms.awq import AWQConfig, AWQObservedLinear, AWQObserver, AWQStep, get_act_scale
from pennyweight_torchao.algorithms.smooth_observers import SmoothQuantObservedLinear
from pennyweight_torchao.algorithms.smoothquant import SmoothQuantConfig
from pennyweight_torchao.int4_views import Int4Tensor
from pennyweight_torchao.int8_float8_views import Int8Tensor
from pennyweight_torchao.protocols import SupportsActivationPreScaling
from pennyweight_torchao.quant_api import quantize_
from pennyweight_torchao.v0_8_configs import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
)
from tests.kernels.cpu.instruction_set import is_zen_4

GOLDEN = Path(__file__).parent / "golden"
V18 = load_file(GOLDEN / "torchao_algorithms_0.18.safetensors")
RECORDED_HERE = is_zen_4()
BASES: dict[str, Any] = {
    "weight_only": pw.Int8WeightOnlyConfig(),
    "dynamic": Int8DynamicActivationInt8WeightConfig(),
    "static": Int8StaticActivationInt8WeightConfig(granularity=pw.PerTensor()),
}
CONFIGS: dict[str, Any] = {"awq": AWQConfig, "smooth": SmoothQuantConfig}


def golden_model(found: dict[str, Tensor] = V18) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    model.load_state_dict({k.removeprefix("layer"): v for k, v in found.items() if k.startswith("layer")})
    return model.requires_grad_(False)


def run(model: nn.Module, batches: Any) -> None:
    for batch in batches:
        model(batch)


def converted(algorithm: str, base: Any, model: nn.Module, batches: Any, **kwargs: Any) -> nn.Module:
    quantize_(model, CONFIGS[algorithm](base, step="prepare", **kwargs))
    run(model, batches)
    quantize_(model, CONFIGS[algorithm](base, step="convert", **kwargs))
    return model


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 40, bias=False)).bfloat16()


@pytest.fixture
def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    outliers = torch.linspace(0.05, 3, 96) ** 2
    return [(torch.randn(3, 7, 96, generator=g) * outliers).bfloat16() for _ in range(3)]


def error(model: nn.Module, reference: nn.Module, batches: list[Tensor]) -> float:
    return sum((model(x) - reference(x)).float().pow(2).mean().item() for x in batches)


# -- numbers -----------------------------------------------------------------------------------------------------------


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether numbers are the recorded ones but for the last bits of ``torch.pow``, which differ between processors."""
    found = found.reshape(wanted.shape)
    if wanted.dtype is torch.int8:
        difference = (found.int() - wanted.int()).abs()
        return bool(difference.max() <= 1 and (difference > 0).float().mean() < 0.01)
    return torch.allclose(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", sorted({k.rsplit(".", 2)[0] for k in V18 if k.startswith(("awq.", "smooth."))}))
def test_numbers_of_0_18(case: str) -> None:
    algorithm, base = case.split(".")
    model = converted(algorithm, BASES[base], golden_model(), V18["x"])
    for i in (0, 2):
        w: Any = model[i].weight  # type: ignore[index]
        for role in ("act_pre_scale", "qdata", "scale", "act_quant_scale"):
            wanted = V18.get(f"{case}.{i}.{role}")
            if wanted is None:
                continue
            found = getattr(w, role)
            if algorithm == "awq" and role == "act_pre_scale" and not alike(found, wanted) and not RECORDED_HERE:
                pytest.skip("the search takes another of two scales with nearly the same loss on this processor")
            assert alike(found, wanted), (i, role)
    assert f"{case}.2.act_quant_scale" in V18 or base != "static"


def test_the_search_is_never_worse_than_rounding(model: nn.Sequential, batches: list[Tensor]) -> None:
    observer = AWQObserver(model[0].weight, model[0].bias, Int4WeightOnlyConfig(group_size=32))
    with pytest.raises(AssertionError, match="calibrate observer first"):
        observer.calculate_qparams()
    plain = copy.deepcopy(model)
    quantize_(plain, Int4WeightOnlyConfig(group_size=32))
    q = converted("awq", Int4WeightOnlyConfig(group_size=32), copy.deepcopy(model), batches)
    first = copy.deepcopy(model)
    first[0] = plain[0]
    awq_first = copy.deepcopy(model)
    awq_first[0] = q[0]  # type: ignore[index]
    assert error(awq_first[:1], model[:1], batches) < error(first[:1], model[:1], batches)
    one = converted(
        "awq", Int4WeightOnlyConfig(group_size=32), copy.deepcopy(model), batches, scale_search_space_size=1
    )
    assert torch.equal(one(batches[0]), plain(batches[0]))
    with pytest.raises(ValueError, match="at least 1"):
        AWQObserver(model[0].weight, None, Int4WeightOnlyConfig(), 0)


def test_channels_without_input(model: nn.Sequential) -> None:
    x = torch.zeros(4, 96, dtype=torch.bfloat16)
    q = converted("awq", BASES["dynamic"], copy.deepcopy(model), [x])
    assert q[0].weight.act_pre_scale.isfinite().all()  # type: ignore[index, union-attr]
    q = converted("smooth", BASES["dynamic"], copy.deepcopy(model), [x])
    assert q(torch.ones_like(x)).isfinite().all()
    assert torch.equal(get_act_scale(torch.tensor([[[1.0, -2.0]], [[3.0, 0.0]]])), torch.tensor([2.0, 1.0]))


def test_a_static_scale_in_two_passes() -> None:
    model, config = golden_model(), SmoothQuantConfig(BASES["static"], step="prepare", use_running_absmax=True)
    quantize_(model, config)
    run(model, V18["x"])
    quantize_(model, SmoothQuantConfig(BASES["static"], "PREPARE_FOR_SMOOTHQUANT_SMOOTHING_FACTOR", 0.5, True))
    run(model, V18["x"])
    quantize_(model, SmoothQuantConfig(BASES["static"], "convert", use_running_absmax=True))
    w: Any = model[0].weight
    assert alike(w.act_pre_scale, V18["smooth.static.0.act_pre_scale"])
    assert alike(w.qdata, V18["smooth.static.0.qdata"])
    torch.testing.assert_close(w.act_quant_scale.reshape(1), V18["smooth.static.0.act_quant_scale"].reshape(1))


# -- configs and layers ------------------------------------------------------------------------------------------------


def test_steps() -> None:
    base = pw.Int8WeightOnlyConfig()
    assert AWQConfig(base, "PREPARE").step == AWQConfig(base, AWQStep.PREPARE).step == "prepare"
    assert AWQConfig(base, step=AWQStep.CONVERT, scale_search_space_size=5).scale_search_space_size == 5
    for config in (AWQConfig, SmoothQuantConfig):
        with pytest.raises(ValueError, match=r"nothing is not one of \['prepare', 'convert'"):
            config(base, step="nothing")
    with pytest.raises(ValueError, match="steps prepare, convert"):
        quantize_(golden_model(), AWQConfig(base, "prepare_for_smoothquant_smoothing_factor"))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_layers_that_are_not_observed_stay(algorithm: str, model: nn.Sequential, batches: list[Tensor]) -> None:
    base = Int4WeightOnlyConfig(group_size=32)
    quantize_(model, CONFIGS[algorithm](base, "prepare"), lambda m, name: name == "0")
    assert type(model[0]) in (AWQObservedLinear, SmoothQuantObservedLinear)
    assert type(model[2]) is nn.Linear
    observer = "act_obs" if algorithm == "awq" else "obs"
    assert {k for k in model.state_dict() if observer not in k} == {"0.weight", "0.bias", "2.weight"}
    run(model, batches)
    last = model[2].weight
    quantize_(model, CONFIGS[algorithm](base, "convert"))
    assert model[2].weight is last
    assert type(model[0]) is nn.Linear
    quantize_(model, base)  # the other layer; the first has its weight
    assert model[0].weight.pre_scale is not None
    assert model[2].weight.pre_scale is None
    assert isinstance(model[2].weight, Int4Tensor)


@pytest.mark.parametrize(
    ("algorithm", "base"), [(a, b) for a in CONFIGS for b in ("int4", *BASES) if (a, b) != ("awq", "static")]
)
def test_state_dicts(algorithm: str, base: str, model: nn.Sequential, batches: list[Tensor]) -> None:
    config = BASES.get(base, Int4WeightOnlyConfig(group_size=32))
    q = converted(algorithm, config, copy.deepcopy(model), batches)
    y = q(batches[0])
    assert list(q.state_dict()) == list(model.state_dict())
    file = io.BytesIO()
    torch.save(q.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    empty = copy.deepcopy(model)
    nn.init.normal_(empty[0].weight)
    quantize_(empty, CONFIGS[algorithm](config, "prepare_for_loading"))
    assert not torch.equal(empty(batches[0]), y)
    if base != "static":  # its activation has a scale of its own in each checkpoint: assign
        empty.load_state_dict(state)
        assert torch.equal(empty(batches[0]), y)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(batches[0]), y)
    tensors, metadata = flatten_tensor_state_dict(q.state_dict())
    assert "0._weight_act_pre_scale" in tensors
    found, left = unflatten_tensor_state_dict(tensors, metadata)
    assert left == {}
    model.load_state_dict(found, assign=True)
    assert torch.equal(model(batches[0]), y)


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_our_own_files_and_calls_take_it(
    algorithm: str, model: nn.Sequential, batches: list[Tensor], tmp_path: Path
) -> None:
    """A weight of AWQ or SmoothQuant is an ordinary one: torchao's file, our file, frozen, moved by its name."""
    from safetensors.torch import save_file

    q = converted(algorithm, BASES["dynamic"], copy.deepcopy(model), batches)
    y = q(batches[0])
    tensors, metadata = flatten_tensor_state_dict(q.state_dict())
    save_file(tensors, tmp_path / "torchao.safetensors", metadata)
    pw.save(q, tmp_path / "native.safetensors")
    for name in ("torchao", "native"):
        other = copy.deepcopy(model)
        other.load_state_dict(pw.open(tmp_path / f"{name}.safetensors").state_dict(), assign=True)
        assert torch.equal(other(batches[0]), y), name
    pw.inference.freeze_(q)
    torch.testing.assert_close(q(batches[0]), y)


# -- the weight --------------------------------------------------------------------------------------------------------


@pytest.fixture
def weight() -> pw.AffineQuantizedTensor:
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    pre = torch.linspace(0.5, 2, 64)
    made = Int8Tensor.from_hp(w, pw.PerRow(), act_pre_scale=pre)
    assert torch.equal(made.act_pre_scale, pre)
    return made


def test_linear_scales_its_input(weight: Any) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6), requires_grad=True)
    y = F.linear(x, weight)
    wanted = (x * weight.act_pre_scale) @ weight.with_(pre_scale=None).dequantize().t()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).expand(5, 64))
    assert F.linear(x.bfloat16(), weight).dtype is torch.bfloat16
    below = torch.ops.aten.linear.default(x.detach(), weight, torch.ones(8))
    torch.testing.assert_close(below, y.detach() + 1)
    torch.testing.assert_close(x @ weight.t(), y)


def test_what_the_weight_shows(weight: Any) -> None:
    assert isinstance(weight, Int8Tensor)
    assert not isinstance(weight, Int4Tensor)
    assert isinstance(weight, SupportsActivationPreScaling)
    assert weight.qdata.shape == (8, 64)
    assert weight.block_size == [1, 64]
    for broken in (torch.ones(63), torch.ones(64, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"one number per input channel, \[64\]"):
            with_pre_scale(weight, broken)


def test_rows_and_columns(weight: Any) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(F.linear(x, weight[2:5]), F.linear(x, weight)[:, 2:5])
    halves = F.linear(x[:, :32], weight[:, :32]) + F.linear(x[:, 32:], weight.narrow(1, 32, 32))
    torch.testing.assert_close(halves, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    bare = weight.with_(pre_scale=None)
    same = with_pre_scale(bare, torch.tensor([2.0]))
    torch.testing.assert_close(F.linear(x[:, :32], same[:, :32]), 2 * F.linear(x[:, :32], bare[:, :32]))


def test_copies_and_compile(weight: Any) -> None:
    layer = nn.Linear(64, 8, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6))
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(F.linear(x, weight.detach().clone()), y)
    with torch.inference_mode():
        assert torch.equal(layer(x), y)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), y)
    assert layer.to(torch.bfloat16)(x.bfloat16()).dtype is torch.bfloat16


def test_a_static_config_without_a_scale() -> None:
    config = Int8StaticActivationInt8WeightConfig(
        granularity=pw.PerTensor(), act_mapping_type=pw.MappingType.ASYMMETRIC
    )
    assert config.get_act_quant_kwargs().mapping_type is pw.MappingType.ASYMMETRIC
    with pytest.raises(ValueError, match="act_quant_scale must be a positive number"):
        quantize_(golden_model(), config)
    q = converted("smooth", config, golden_model(), V18["x"])
    assert q[0].weight.act_quant_zero_point.numel() == 1  # type: ignore[index, union-attr]
    assert error(q, golden_model(), list(V18["x"])) < 1e-3
