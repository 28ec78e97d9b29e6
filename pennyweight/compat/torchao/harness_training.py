"""torchao.testing.training (before 0.12 testing.float8): a small model, and comparisons of sharded training steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .float8_training import (
    CastConfig,
    Float8LinearConfig,
    ScalingType,
    precompute_float8_dynamic_scale_for_fsdp,
)

__all__ = ["FeedForward", "ToyModel", "check_parity_bf16_mp", "check_parity_no_mp", "get_test_float8_linear_config"]
_STEPS = 10


class FeedForward(nn.Module):
    """out_proj(silu(w1(x)) * w2(x)), with twice as many channels in between; no biases."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.out_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.silu(self.w1(x)) * self.w2(x))


class ToyModel(nn.Module):
    """A model around one :class:`FeedForward`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


def get_test_float8_linear_config(
    scaling_type_input: ScalingType, scaling_type_weight: ScalingType, scaling_type_grad_output: ScalingType,
    emulate: bool,
) -> Float8LinearConfig:  # fmt: skip
    """A config with these scalings of the three operands."""
    casts = [CastConfig(kind) for kind in (scaling_type_input, scaling_type_weight, scaling_type_grad_output)]
    return Float8LinearConfig(
        cast_config_input=casts[0], cast_config_weight=casts[1], cast_config_grad_output=casts[2], emulate=emulate
    )


def _step(model: nn.Module, optim: torch.optim.Optimizer, x: Tensor, *, set_to_none: bool) -> Tensor:
    optim.zero_grad(set_to_none=set_to_none)
    loss: Tensor = model(x).sum()
    loss.backward()
    return loss


def _mean_over_ranks(grad: Tensor) -> None:
    torch.distributed.all_reduce(grad)
    grad.div_(torch.distributed.get_world_size())


def _compare(test_cls: Any, step: int, losses: Sequence[Tensor]) -> None:
    text = f"step {step}: losses {losses[0]} and {losses[1]} differ"
    test_cls.assertEqual(losses[0], losses[1], msg=text)  # noqa: PT009 - the caller's, which compares tensors


def check_parity_no_mp(
    test_cls: Any, ref_model: nn.Module, ref_optim: torch.optim.Optimizer, fsdp_model: nn.Module,
    fsdp_optim: torch.optim.Optimizer, local_inp: Tensor, config: Float8LinearConfig, precompute: bool = False,
    compile_transformer_block: bool = False,
) -> None:  # fmt: skip
    """Train both models for ten steps and assert equal losses. Gradients of the reference are averaged over the ranks.

    test_cls    a TestCase of torch, whose assertEqual compares tensors
    precompute  call precompute_float8_dynamic_scale_for_fsdp after each step of the sharded model
    """
    for ref, sharded in zip(ref_model.parameters(), fsdp_model.parameters(), strict=True):
        test_cls.assertEqual(ref.requires_grad, sharded.requires_grad, msg="requires_grad differs")  # noqa: PT009
    for step in range(_STEPS):
        losses = []
        for model, optim in ((ref_model, ref_optim), (fsdp_model, fsdp_optim)):
            losses.append(_step(model, optim, local_inp, set_to_none=step % 2 == 0))
            for parameter in model.parameters() if model is ref_model else ():
                if parameter.grad is not None:
                    _mean_over_ranks(parameter.grad)
            optim.step()
            if model is fsdp_model and precompute and config.cast_config_weight.scaling_type is ScalingType.DYNAMIC:
                precompute_float8_dynamic_scale_for_fsdp(model)
        _compare(test_cls, step, losses)


def check_parity_bf16_mp(
    test_cls: Any, ref_model: nn.Module, ref_model_bf16: nn.Module, ref_optim: torch.optim.Optimizer,
    fsdp_model: nn.Module, fsdp_optim: torch.optim.Optimizer, local_inp: Tensor,
) -> None:  # fmt: skip
    """As :func:`check_parity_no_mp`, in mixed precision: the reference computes in bfloat16, and ``ref_optim`` updates
    the float32 parameters of ``ref_model``, which are copied into it after each step."""
    for step in range(_STEPS):
        losses = []
        for model, optim in ((ref_model_bf16, ref_optim), (fsdp_model, fsdp_optim)):
            losses.append(_step(model, optim, local_inp, set_to_none=step % 2 == 0))
            pairs = list(zip(ref_model_bf16.parameters(), ref_model.parameters(), strict=True))
            for narrow, wide in pairs if model is ref_model_bf16 else ():
                assert narrow.grad is not None
                _mean_over_ranks(narrow.grad)
                wide.grad, narrow.grad = narrow.grad.float(), None
            optim.step()
            with torch.no_grad():
                for narrow, wide in pairs:
                    narrow.copy_(wide)
        _compare(test_cls, step, losses)
