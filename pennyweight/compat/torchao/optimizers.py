"""torchao.optim: low-bit optimizers. Ours, under the same names and arguments.

States are our quantized tensors. The formats of second moments differ from torchao's (docs/optimizers.md), as do the
block sizes of 4-bit states unless ``block_size`` is given; a learning rate need not be a tensor.
"""

from __future__ import annotations

import math
from typing import Any

from ...optim import (
    Adam4bit,
    Adam8bit,
    AdamFp8,
    AdamW4bit,
    AdamW8bit,
    AdamWFp8,
    CPUOffloadOptimizer,
)

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "CPUOffloadOptimizer", "_AdamW",
]  # fmt: skip


class _AdamW(AdamW8bit):
    """AdamW with float32 states, for quantized parameters; bit-identical to torch.optim for the others."""

    LEAST = math.inf

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, bf16_stochastic_round: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, bf16_stochastic_round=bf16_stochastic_round)
