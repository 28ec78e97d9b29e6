"""torchao.testing.training and torchao._executorch_ops."""

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase

from pennyweight.compat.torchao import _executorch_ops as ops
from pennyweight.compat.torchao.float8 import CastConfig, Float8LinearConfig, ScalingType
from pennyweight.compat.torchao.testing.training import fsdp2_utils
from pennyweight.compat.torchao.testing.training.dtensor_utils import FeedForward, ToyModel
from pennyweight.compat.torchao.testing.training.test_utils import get_test_float8_linear_config


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-3)


def test_models() -> None:
    model = ToyModel(8)
    assert isinstance(model.ffn, FeedForward)
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == {
        "ffn.w1.weight": (16, 8), "ffn.w2.weight": (16, 8), "ffn.out_proj.weight": (8, 16),
    }  # fmt: skip
    x, ffn = torch.randn(3, 8), model.ffn
    want = (nn.functional.silu(x @ ffn.w1.weight.t()) * (x @ ffn.w2.weight.t())) @ ffn.out_proj.weight.t()
    torch.testing.assert_close(model(x), want)


@pytest.mark.usefixtures("one_rank")
def test_parity() -> None:
    model, x = ToyModel(8), torch.randn(4, 8)
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    fsdp2_utils.check_parity_no_mp(TestCase(), model, sgd(model), twin, sgd(twin), x, Float8LinearConfig(), True)
    assert not torch.equal(model.ffn.w1.weight, other.ffn.w1.weight)
    assert torch.equal(model.ffn.w1.weight, twin.ffn.w1.weight)
    faster = torch.optim.SGD(twin.parameters(), 1e-1)
    with pytest.raises(AssertionError, match="step 1: losses"):
        fsdp2_utils.check_parity_no_mp(TestCase(), model, sgd(model), twin, faster, x, Float8LinearConfig())
    other.ffn.w1.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match="requires_grad differs"):
        fsdp2_utils.check_parity_no_mp(TestCase(), model, sgd(model), other, sgd(other), x, Float8LinearConfig())


class _Mixed(nn.Module):
    """What fully_shard with a mixed-precision policy computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = {name: p.bfloat16() for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, narrow, (x,))


@pytest.mark.usefixtures("one_rank")
def test_parity_of_mixed_precision() -> None:
    model, x = ToyModel(8), torch.randn(4, 8).bfloat16()
    narrow, mixed = copy.deepcopy(model).bfloat16(), _Mixed(copy.deepcopy(model))
    fsdp2_utils.check_parity_bf16_mp(TestCase(), model, narrow, sgd(model), mixed, sgd(mixed), x)
    assert torch.equal(narrow.ffn.w1.weight, model.ffn.w1.weight.bfloat16())
    assert torch.equal(model.ffn.w1.weight, mixed.model.ffn.w1.weight)


def test_float8_config() -> None:
    config = get_test_float8_linear_config(ScalingType.DYNAMIC, ScalingType.DYNAMIC, ScalingType.DISABLED, True)
    assert config.emulate
    assert config.cast_config_grad_output.scaling_type is ScalingType.DISABLED
    assert config.cast_config_input == CastConfig(target_dtype=torch.float8_e4m3fn)


def test_executorch_operators() -> None:
    x = torch.randn(4, 64)
    scale, zero = ops._quantized_decomposed_choose_qparams_per_token_asymmetric_wrapper(x, torch.int8)
    q = ops._quantized_decomposed_quantize_per_token_wrapper(x, scale, zero, -128, 127, torch.int8)
    back = ops._quantized_decomposed_dequantize_per_token_wrapper(q, scale, zero, -128, 127, torch.int8, torch.float32)
    assert (back - x).abs().max() <= scale.max()
    scale, zero = x.view(4, 2, 32).abs().amax(-1) / 7.5, torch.zeros(4, 2, dtype=torch.int32)
    q = ops._quantized_decomposed_quantize_per_channel_group_wrapper(x, scale, zero, -8, 7, torch.int8, 32)
    assert (q.amin() >= -8, q.amax() <= 7) == (True, True)
    back = ops._quantized_decomposed_dequantize_per_channel_group_wrapper(
        q, scale, zero, -8, 7, torch.int8, 32, torch.float32
    )
    assert (back - x).abs().max() <= scale.max()
