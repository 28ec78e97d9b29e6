"""MX and NVFP4 layers under torchao's names: inference, static inputs, training, training for deployment."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from pennyweight_torchao.enums import KernelPreference, MXGemmKernelChoice, NVFP4MMConfig, ScaleCalculationMode
from pennyweight_torchao.prototype.mx_formats import (
    MXDynamicActivationMXWeightConfig,
    MXFPInferenceConfig,
    MXLinearConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4InferenceConfig,
    NVFP4WeightOnlyConfig,
)
from pennyweight_torchao.prototype.mx_formats.mx_linear import MXLinear
from pennyweight_torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype, to_mx
from pennyweight_torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from pennyweight_torchao.prototype.qat import (
    MXFakeQuantizeConfig,
    MXFakeQuantizedLinear,
    NVFP4FakeQuantizeConfig,
    NVFP4FakeQuantizedLinear,
)
from pennyweight_torchao.quantization import quantize_
from pennyweight_torchao.quantization.qat import QATConfig

GOLDEN = load_file(str(Path(__file__).parent / "golden" / "torchao_0.18_mx.safetensors"))
FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


def rounded(x: torch.Tensor, element=FP8, mode=ScaleCalculationMode.FLOOR) -> torch.Tensor:
    """x as MX stores it, blocks along its last axis."""
    scale, codes = to_mx(x.contiguous(), element, 32, mode)
    return to_dtype(codes, scale, element, 32, x.dtype)


# -- inference ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_configs_of_every_release() -> None:
    x, exact = torch.randn(40, 64), model()
    for config, view, least in (
        (MXFPInferenceConfig(), MXTensor, 22),
        (MXFPInferenceConfig(activation_dtype=FP4, weight_dtype=FP4), MXTensor, 9),
        (MXDynamicActivationMXWeightConfig(), MXTensor, 22),
        (NVFP4InferenceConfig(), NVFP4Tensor, 12),
        (NVFP4InferenceConfig(NVFP4MMConfig.WEIGHT_ONLY), NVFP4Tensor, 15),
        (NVFP4WeightOnlyConfig(), NVFP4Tensor, 15),
        (NVFP4DynamicActivationNVFP4WeightConfig(), NVFP4Tensor, 12),
        (NVFP4DynamicActivationNVFP4WeightConfig(True, False), NVFP4Tensor, 12),
    ):
        m = model()
        quantize_(m, config)
        assert isinstance(m[0].weight, view)
        assert sqnr(exact(x), m(x)) > least, config
    m = model()
    quantize_(m, MXFPInferenceConfig())
    w = m[0].weight
    assert torch.equal(w.dequantize(), rounded(exact[0].weight))
    torch.testing.assert_close(m[0](x), F.linear(rounded(x), w.dequantize(), m[0].bias))


def test_nvfp4_config() -> None:
    config = NVFP4DynamicActivationNVFP4WeightConfig()
    assert (config.use_triton_kernel, config.use_dynamic_per_tensor_scale, config.step) == (True, True, None)
    assert isinstance(config, pw.NVFP4DynamicActivationNVFP4WeightConfig)
    with pytest.raises(ValueError, match="for static inputs give act_scale, the largest input"):
        quantize_(model(), NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
    with pytest.raises(ValueError, match="no_such"):
        NVFP4DynamicActivationNVFP4WeightConfig(step="no_such")


# -- training ----------------------------------------------------------------------------------------------------------


def test_the_three_products() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32, bias=True), torch.randn(2, 16, 64, requires_grad=True)
    weight, bias = layer.weight, layer.bias
    config = MXLinearConfig(elem_dtype_weight_override=FP4, elem_dtype_grad_output_override=torch.float8_e5m2)
    assert MXLinear.from_float(layer, config) is layer
    assert isinstance(layer, MXLinear)
    assert layer.weight is weight
    y = layer(x)
    flat = x.detach().reshape(-1, 64)
    torch.testing.assert_close(y.reshape(-1, 32), F.linear(rounded(flat), rounded(weight.detach(), FP4), bias))
    g = torch.randn(2, 16, 32)
    y.backward(g)
    up = g.reshape(-1, 32)
    down = rounded(up, torch.float8_e5m2) @ rounded(weight.detach().t(), FP4).t()
    torch.testing.assert_close(x.grad.reshape(-1, 64), down)
    across = rounded(up.t(), torch.float8_e5m2) @ rounded(flat.t()).t()
    torch.testing.assert_close(weight.grad, across)
    torch.testing.assert_close(bias.grad, up.sum(0))
    assert "lp_w_override=f4e2m1, lp_go_override=f8e5m2" in str(layer)


def test_models_are_converted() -> None:
    m = model()
    quantize_(m, MXLinearConfig.from_recipe_name("mxfp4_emulated"))
    assert isinstance(m[0], MXLinear)
    assert m[0].config.elem_dtype is FP4
    m(torch.randn(5, 64)).sum().backward()  # a number of rows that is no multiple of 32
    assert m[0].weight.grad.isfinite().all()
    with pytest.raises(AssertionError, match=r"takes an nn.Linear and an MXLinearConfig, got ReLU"):
        MXLinear.from_float(nn.ReLU())


def test_training_configs() -> None:
    config = MXLinearConfig.from_recipe_name("mxfp8_cublas")
    assert (config.elem_dtype, config.gemm_kernel_choice) == (FP8, MXGemmKernelChoice.CUBLAS)
    assert config.short_str() == "bl_sz=32, lp_dtype=f8e4m3, kernel=cublas"
    config.block_size = 16  # torchao's can be changed
    assert config.recipe().output.a.spec.block == (16,)
    with pytest.raises(AssertionError, match="not in valid names"):
        MXLinearConfig.from_recipe_name("mxfp2")
    with pytest.raises(AssertionError, match="block_size must be one of"):
        MXLinearConfig(64, gemm_kernel_choice=MXGemmKernelChoice.CUTLASS)
    with pytest.raises(AssertionError, match="elem_dtype must be float8_e4m3fn or float4"):
        MXLinearConfig(elem_dtype="fp6_e2m3", gemm_kernel_choice=MXGemmKernelChoice.CUBLAS)
    with pytest.raises(AssertionError, match="needs gemm_kernel_choice EMULATED"):
        MXLinearConfig(elem_dtype_weight_override=FP4, gemm_kernel_choice=MXGemmKernelChoice.CUBLAS)
    with pytest.raises(AssertionError, match="elem_dtype must be one of"):
        MXLinearConfig(elem_dtype=torch.int8)
    with pytest.raises(AssertionError, match="inputs and weights must have one dtype"):
        MXFPInferenceConfig(activation_dtype=FP4)


# -- training for deployment -------------------------------------------------------------------------------------------


def test_mx_qat_computes_what_torchao_does() -> None:
    config = MXFakeQuantizeConfig()
    layer = MXFakeQuantizedLinear(64, 32, True, config, config)
    layer.weight.data, layer.bias.data = GOLDEN["qat.mx.weight"].clone(), GOLDEN["qat.mx.bias"].clone()
    x = GOLDEN["qat.mx.x"].clone().requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y, GOLDEN["qat.mx.y"])
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, GOLDEN["qat.mx.grad_x"])
    torch.testing.assert_close(layer.weight.grad, GOLDEN["qat.mx.grad_weight"])
    torch.testing.assert_close(layer.bias.grad, 2 * y.detach().sum((0, 1)))  # torchao's has none
    assert (layer.activation_config, layer.weight_config) == (config, config)


CASES = {
    "mxfp4": (MXDynamicActivationMXWeightConfig(activation_dtype=FP4, weight_dtype=FP4), MXFakeQuantizedLinear),
    "mxfp8": (MXDynamicActivationMXWeightConfig(), MXFakeQuantizedLinear),
    "nvfp4": (NVFP4DynamicActivationNVFP4WeightConfig(), NVFP4FakeQuantizedLinear),
    "nvfp4 one level": (NVFP4DynamicActivationNVFP4WeightConfig(True, False), NVFP4FakeQuantizedLinear),
}


@pytest.mark.parametrize("name", CASES)
def test_prepare_and_convert(name: str) -> None:
    base, kind = CASES[name]
    m, x = model(), torch.randn(6, 64)
    quantize_(m, QATConfig(base, step="prepare"))
    assert isinstance(m[0], kind)
    assert not isinstance(m[1], kind)
    optimizer = torch.optim.SGD(m.parameters(), 0.05)
    losses = []
    for _ in range(8):
        loss = m(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    y = m(x)
    quantize_(m, QATConfig(base, step="convert"))
    assert type(m[0]) is nn.Linear
    assert torch.equal(m(x), y)
    twin = model()
    twin.load_state_dict(
        {k: v.dequantize() if isinstance(v, pw.AffineQuantizedTensor) else v for k, v in m.state_dict().items()}
    )
    assert not isinstance(twin[0], kind)


@pytest.mark.parametrize(
    ("config", "kind", "other"),
    [
        (
            MXFakeQuantizeConfig(FP8, scaling_mode=ScaleCalculationMode.EVEN),
            MXFakeQuantizedLinear,
            NVFP4FakeQuantizedLinear,
        ),
        (NVFP4FakeQuantizeConfig(), NVFP4FakeQuantizedLinear, MXFakeQuantizedLinear),
        (NVFP4FakeQuantizeConfig(use_per_tensor_scale=False), NVFP4FakeQuantizedLinear, MXFakeQuantizedLinear),
    ],
)
def test_layers_by_hand(config, kind, other) -> None:
    linear = nn.Linear(64, 32)
    weight = linear.weight
    layer = kind.from_linear(linear, config, config)
    assert isinstance(layer, kind)
    assert not isinstance(layer, other)
    assert not isinstance(nn.Linear(2, 2), kind)
    assert layer.weight is weight
    assert layer(torch.randn(2, 3, 64)).shape == (2, 3, 32)
    m = model()
    quantize_(m, QATConfig(activation_config=config, weight_config=config, step="prepare"))
    assert isinstance(m[0], kind)
    x = torch.randn(4, 64)
    m[0].weight.data, m[0].bias.data = weight.data, linear.bias.data
    assert torch.equal(m[0](x), layer(x))
    plain = layer.to_linear()
    assert type(plain) is nn.Linear
    assert plain.weight is weight
    with pytest.raises(ValueError, match="Must specify `weight_config`"):
        kind(64, 32, False, config)


def test_fake_quantize_configs() -> None:
    config = MXFakeQuantizeConfig()
    assert (config.dtype, config.block_size, config.rule) == (FP4, 32, "mx_rceil")
    MXFakeQuantizeConfig(FP8, kernel_preference=KernelPreference.AUTO)
    with pytest.raises(AssertionError, match=r"does not support torch\.float8_e5m2"):
        MXFakeQuantizeConfig(torch.float8_e5m2, kernel_preference=KernelPreference.AUTO)
    with pytest.raises(AssertionError, match=r"use KernelPreference\.EMULATED"):
        MXFakeQuantizeConfig(kernel_preference=KernelPreference.TORCH)
    with pytest.raises(AssertionError, match="elem_dtype must be one of"):
        MXFakeQuantizeConfig(torch.int4)
