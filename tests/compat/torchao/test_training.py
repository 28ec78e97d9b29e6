"""Low-precision training under torchao's names."""

import copy

import pytest
import torch
from torch import nn

from pennyweight.core.formats import E5M2
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.training import RECIPES, LowPrecisionLinear


@pytest.mark.usefixtures("torchao")
def test_float8_recipes_are_ours() -> None:
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
    from torchao.float8.config import Float8LinearRecipeName, ScalingGranularity

    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert Float8LinearConfig.from_recipe_name(name).recipe() is RECIPES[name]
    assert Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE).round_scales_to_power_of_2
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    config = Float8LinearConfig(emulate=True)
    got = convert_to_float8_training(model, module_filter_fn=lambda m, n: n == "0", config=config)
    assert got is model
    assert [type(m) for m in model] == [LowPrecisionLinear, nn.Linear]
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
    with pytest.raises(ValueError, match="must be float8_e4m3fn or float8_e5m2"):
        Float8LinearConfig(cast_config_input=CastConfig(target_dtype=torch.bfloat16))


@pytest.mark.usefixtures("torchao")
def test_int8_and_ternary_training() -> None:
    from torchao.prototype.quantized_training import (
        bitnet_training,
        int8_mixed_precision_training,
        int8_weight_only_quantized_training,
        quantize_int8_rowwise,
    )
    from torchao.quantization import quantize_

    start = nn.Sequential(nn.Linear(32, 32))
    x = torch.randn(8, 32)
    for config, name in ((int8_mixed_precision_training(), "int8"), (bitnet_training(), "bitnet")):
        model = copy.deepcopy(start)
        quantize_(model, config)
        assert model[0].recipe is RECIPES[name]
        assert not torch.equal(model(x), start(x))  # torchao 0.15 on: the int8 one silently computes in full precision
    quantize_(start, int8_weight_only_quantized_training())
    assert isinstance(start[0].weight, AffineQuantizedTensor)
    assert start[0].weight.requires_grad
    codes, scale = quantize_int8_rowwise(x)
    assert (codes.float() * scale.unsqueeze(1) - x).abs().max() <= scale.max() / 2 * 1.01
    up, _ = quantize_int8_rowwise(x, stochastic_rounding=True)
    assert (up - codes).abs().max() == 1
    with pytest.raises(ImportError, match="MXTrainingConfig"):
        from torchao.prototype.mx_formats import MXLinearConfig  # noqa: F401
