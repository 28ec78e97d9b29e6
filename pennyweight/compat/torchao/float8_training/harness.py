# ruff: noqa: PT009 (methods of a unittest case, which the caller gives)
"""torchao.testing.training: a small model, a config of a test, and comparison of training with FSDP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .config import CastConfig, Float8LinearConfig, ScalingType
from .layers import precompute_float8_dynamic_scale_for_fsdp

__all__ = ["FeedForward", "ToyModel", "check_parity_bf16_mp", "check_parity_no_mp", "get_test_float8_linear_config"]


class FeedForward(nn.Module):
    """out_proj(silu(w1(x)) * w2(x)), with twice ``size`` inner channels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, size * 2, bias=False)
        self.w2 = nn.Linear(size, size * 2, bias=False)
        self.out_proj = nn.Linear(size * 2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(F.silu(self.w1(x)) * self.w2(x))


class ToyModel(nn.Module):
    """One :class:`FeedForward` named "ffn"."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(x)


def get_test_float8_linear_config(
    scaling_type_input: ScalingType, scaling_type_weight: ScalingType, scaling_type_grad_output: ScalingType,
    emulate: bool,
) -> Float8LinearConfig:  # fmt: skip
    """A config with these scaling types."""
    return Float8LinearConfig(
        cast_config_input=CastConfig(scaling_type=scaling_type_input),
        cast_config_weight=CastConfig(scaling_type=scaling_type_weight),
        cast_config_grad_output=CastConfig(scaling_type=scaling_type_grad_output),
        emulate=emulate,
    )


def _mean_over_ranks(grad: Tensor) -> Tensor:
    dist.all_reduce(grad)
    return grad.div_(dist.get_world_size())


def check_parity_no_mp(
    test_cls: Any, ref_model: nn.Module, ref_optim: torch.optim.Optimizer, fsdp_model: nn.Module,
    fsdp_optim: torch.optim.Optimizer, local_inp: Tensor, config: Float8LinearConfig, precompute: bool = False,
    compile_transformer_block: bool = False,
) -> None:  # fmt: skip
    """Ten steps of a model and of its sharded copy: ``test_cls.assertEqual`` of their losses. Gradients of the first
    are averaged over ranks."""
    for mine, theirs in zip(ref_model.parameters(), fsdp_model.parameters(), strict=True):
        test_cls.assertEqual(mine.requires_grad, theirs.requires_grad)
    for step in range(10):
        losses = []
        for model, optimizer in ((ref_model, ref_optim), (fsdp_model, fsdp_optim)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(model(local_inp).sum())
            losses[-1].backward()
            if model is ref_model:
                for p in model.parameters():
                    if p.grad is not None:
                        _mean_over_ranks(p.grad)
            optimizer.step()
            if model is fsdp_model and precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
        test_cls.assertEqual(*losses, msg=f"step {step}: losses {losses}")


def check_parity_bf16_mp(
    test_cls: Any, ref_model: nn.Module, ref_model_bf16: nn.Module, ref_optim: torch.optim.Optimizer,
    fsdp_model: nn.Module, fsdp_optim: torch.optim.Optimizer, local_inp: Tensor,
) -> None:  # fmt: skip
    """Ten steps of a float32 model through its bfloat16 copy, and of a sharded model with mixed precision:
    ``test_cls.assertEqual`` of their losses."""
    pairs = list(zip(ref_model.parameters(), ref_model_bf16.parameters(), strict=True))
    for step in range(10):
        losses = []
        for model, optimizer in ((ref_model_bf16, ref_optim), (fsdp_model, fsdp_optim)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            losses.append(model(local_inp).sum())
            losses[-1].backward()
            if model is ref_model_bf16:
                for wide, half in pairs:
                    if half.grad is not None:
                        wide.grad, half.grad = _mean_over_ranks(half.grad).float(), None
            optimizer.step()
            for wide, half in pairs:
                half.detach().copy_(wide)
        test_cls.assertEqual(*losses, msg=f"step {step}: losses {losses}")
