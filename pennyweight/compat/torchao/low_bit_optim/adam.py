"""torchao.optim.adam: the update of one parameter, and AdamW with float states for quantized parameters.

The optimizers with quantized states are pennyweight.optim's. Formats of their second moments differ from torchao's
(docs/optimizers.md), as do the block sizes of 4-bit states unless ``block_size`` is given; a learning rate need not be
a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ....optim import AdamW8bit
from ....optim.adam import _Adam as _AdamBase
from ....optim.quantized_states import StateFormat, read, write_
from ....optim.update_rules import adam
from .quantizers import _fp32_to_bf16_sr

__all__ = ["_AdamBase", "_AdamW", "single_param_adam"]


class _AdamW(AdamW8bit):
    """AdamW with float32 states, for quantized parameters; bit-identical to torch.optim for the others."""

    LEAST = math.inf

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, bf16_stochastic_round: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, bf16_stochastic_round=bf16_stochastic_round)


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
