"""torchao.optim.adam: the update of one parameter, over the rule of our optimizers."""

from __future__ import annotations

import torch
from torch import Tensor

from pennyweight.core import stochastic_rounding
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.distributed.dtensor import local_tensor, wrap_like
from pennyweight.optim.quantized_states import StateFormat, read, write_
from pennyweight.optim.update_rules import adam

__all__ = ["_fp32_to_bf16_sr", "single_param_adam"]


def _fp32_to_bf16_sr(_x_f32: Tensor) -> Tensor:
    """float32 stochastically rounded to bfloat16 with torch's random numbers; the mean of the result is x.

    Values that bfloat16 represents do not change; NaN and inf are kept. A DTensor gives a DTensor.
    """
    x = local_tensor(_x_f32)
    words = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32)
    return wrap_like(stochastic_rounding.round_to_bfloat16(x, words), _x_f32)


@torch.no_grad()
def single_param_adam(
    p: Tensor, grad: Tensor, step: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None,
    lr: Tensor, beta1: float, beta2: float, weight_decay: float, eps: float, IS_ADAMW: bool,
    BF16_STOCHASTIC_ROUND: bool,
) -> None:  # fmt: skip
    """One step of Adam or AdamW in place, computed in float32: the rule of our optimizers (optim/update_rules.py).

    step: the number of this step, from 1. max_exp_avg_sq: with it, AMSGrad. States may be quantized: they are rounded
    to nearest under new scales. BF16_STOCHASTIC_ROUND: a bfloat16 parameter is rounded with torch's random numbers.
    """
    count, rate = float(step), float(lr)
    decay, l2 = (1 - rate * weight_decay, 0.0) if IS_ADAMW else (1.0, weight_decay)
    correction = (1 - beta2**count) ** 0.5
    coefficients = [decay, l2, 1 - beta1, beta2, 1 - beta2, correction, eps, rate / (1 - beta1**count)]
    states = [s for s in (exp_avg, exp_avg_sq, max_exp_avg_sq) if s is not None]
    floats = [read(s).to(torch.float32, copy=True) for s in states]
    x = p.dequantize(torch.float32) if isinstance(p, QT) else p.to(torch.float32, copy=True)
    adam(x, grad.float(), floats, coefficients)
    for state, value in zip(states, floats, strict=True):
        if isinstance(state, QT):
            write_(state, value, StateFormat(state.spec))
        else:
            state.copy_(value)
    p.copy_(_fp32_to_bf16_sr(x) if BF16_STOCHASTIC_ROUND else x)
