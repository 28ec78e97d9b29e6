"""Low-precision training under torchao's names."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from pennyweight import training
from pennyweight.core.formats import E5M2
from pennyweight.training import RECIPES, LowPrecisionLinear


@pytest.mark.usefixtures("torchao")
def test_float8_recipes_are_ours() -> None:
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
    from torchao.float8.config import Float8LinearRecipeName, ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear

    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert Float8LinearConfig.from_recipe_name(name).recipe() is RECIPES[name]
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE).round_scales_to_power_of_2
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    config = Float8LinearConfig(emulate=True)
    got = convert_to_float8_training(model, module_filter_fn=lambda m, n: n == "0", config=config)
    assert got is model
    assert [type(m) for m in model] == [Float8Linear, nn.Linear]
    assert isinstance(model[0], LowPrecisionLinear)
    assert model[0].recipe is RECIPES["tensorwise"]
    own = Float8LinearConfig(
        cast_config_input=CastConfig(ScalingType.DYNAMIC, ScalingGranularity.AXISWISE, torch.float8_e5m2),
        cast_config_grad_output_for_grad_weight=CastConfig(ScalingType.DISABLED),
        cast_config_input_for_grad_weight=CastConfig(ScalingType.DISABLED),
    ).recipe()
    assert own.name == "torchao.float8"
    assert own.output.a.spec.format is E5M2
    assert own.output.a.spec.block == (-1,)
    assert not own.grad_weight.quantized
    with pytest.raises(ValueError, match="FSDP gathers weights in their own dtype"):
        Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for arguments, words in (
        ({"target_dtype": torch.bfloat16}, "must be float8_e4m3fn or float8_e5m2"),
        ({"scaling_type": ScalingType.DISABLED, "scaling_granularity": ScalingGranularity.AXISWISE}, "is dynamic"),
    ):
        with pytest.raises(AssertionError, match=words):
            CastConfig(**arguments)
    with pytest.raises(AssertionError, match="incompatible operand precision for output: disabled and dynamic"):
        Float8LinearConfig(cast_config_input=CastConfig(ScalingType.DISABLED))
    with pytest.raises(AssertionError, match="weight must be cast to the same dtype in both products"):
        Float8LinearConfig(cast_config_weight_for_grad_input=CastConfig(target_dtype=torch.float8_e5m2))
    with pytest.raises(AssertionError, match="recipe_name blockwise not in valid names"):
        Float8LinearConfig.from_recipe_name("blockwise")


@pytest.mark.usefixtures("torchao")
def test_layers_of_any_size_become_float8_layers() -> None:
    """The filter sees linear layers only; values, gradients and parameters are those of our recipe."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    seen = []
    model = nn.Sequential(nn.Sequential(nn.Linear(30, 7)), nn.ReLU(), nn.Linear(7, 8, bias=False))
    before = dict(model.named_parameters())
    convert_to_float8_training(model, module_filter_fn=lambda m, n: seen.append((n, m.in_features)) is None)
    assert sorted(seen) == [("0.0", 30), ("2", 7)]
    assert all(p is before[name] for name, p in model.named_parameters())
    assert convert_to_float8_training(nn.Sequential(nn.ReLU())) is not None  # nothing to convert is no error
    root = nn.Linear(8, 8)
    made = convert_to_float8_training(root, config=Float8LinearConfig.from_recipe_name("rowwise"))
    assert (type(root), type(made), made.weight) == (nn.Linear, Float8Linear, root.weight)
    assert repr(made) == (
        "Float8Linear(in_features=8, out_features=8, bias=True, "
        'cast_configs=i:dyn_axs_e4m3,w:dyn_axs_e4m3,go:dyn_axs_e4m3")'
    )
    ours = LowPrecisionLinear(8, 8, recipe="rowwise")
    ours.load_state_dict(made.state_dict())
    x = torch.randn(5, 8)
    for layer in (made, ours):
        layer(x).square().sum().backward()
    assert torch.equal(made(x), ours(x))
    assert torch.equal(root.weight.grad, ours.weight.grad)
    again = copy.deepcopy(made)
    assert torch.equal(again(x), made(x))


@pytest.mark.usefixtures("torchao")
def test_filters_of_recipes() -> None:
    from torchao.float8 import _auto_filter_for_recipe

    def chosen(recipe: str, out: int, into: int, name: str = "mlp.up") -> bool:
        with torch.device("meta"):
            return _auto_filter_for_recipe(recipe, filter_fqns=["lm_head"])(nn.Linear(into, out), name)

    sizes = [(2048, 4096), (2064, 1024), (4096, 2048), (4112, 2048), (4096, 2064), (8192, 8200)]
    assert [chosen("rowwise", *size) for size in sizes] == [False, False, False, True, True, False]
    sizes = [(1024, 4096), (1040, 4096), (1024, 4112), (1030, 8192)]
    assert [chosen("tensorwise", *size) for size in sizes] == [False, True, True, False]
    assert not chosen("tensorwise", 4096, 4096, "model.lm_head")
    assert not _auto_filter_for_recipe("rowwise", [])(nn.Sequential(), "")
    with pytest.raises(NotImplementedError):
        _auto_filter_for_recipe("rowwise_with_gw_hp", [])


@pytest.mark.usefixtures("torchao")
def test_int8_training() -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision_training
    from torchao.quantization import quantize_

    start = nn.Sequential(nn.Linear(32, 32))
    x = torch.randn(8, 32)
    model = copy.deepcopy(start)
    quantize_(model, int8_mixed_precision_training())
    assert model[0].recipe is RECIPES["int8"]
    assert not torch.equal(model(x), start(x))  # torchao 0.15 on: it silently computes in full precision
    with pytest.raises(ImportError, match="call the operator on the tensor"):
        from torchao.prototype.mx_formats.mx_ops import mx_addmm  # noqa: F401


@pytest.mark.usefixtures("torchao")
def test_arguments_of_the_int8_config() -> None:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig, int8_mixed_precision_training

    config = Int8MixedPrecisionTrainingConfig(True, False, True, module_swap=True)
    assert isinstance(config, training.Int8MixedPrecisionTrainingConfig)
    assert (config.output, config.grad_input, config.grad_weight, config.recipe) == (True, False, True, "int8")
    assert not config.make().grad_input.quantized
    assert int8_mixed_precision_training(config) == config  # torchao 0.9
    assert int8_mixed_precision_training(config=config) == config
    assert dataclasses.replace(config, grad_input=True).make().grad_input.quantized
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(ValueError, match="quantizes nothing"):
        Int8MixedPrecisionTrainingConfig(False, False, False)
