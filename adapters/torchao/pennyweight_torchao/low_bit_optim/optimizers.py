"""torchao.optim's optimizers: ours, with a tensor as learning rate and torchao's block sizes.

torchao's users write ``optimizer.param_groups[0]["lr"].fill_(rate)``. The tensor is float64, so that steps are those of
the number. Formats of second moments are ours (docs/optimizers.md).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight import optim
from pennyweight.optim.optimizers import _Adam as _AdamBase
from pennyweight.optim.optimizers import _AdamW as _Decoupled

__all__ = [
    "Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8", "_AdamBase", "_AdamW",
]  # fmt: skip


class _TensorRate(_AdamBase):
    """An optimizer whose groups have a learning rate to be filled in place."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64, device="cpu")

    @property
    def block_size(self) -> int:
        """Elements per scale."""
        return self.defaults["block_size"]

    @property
    def bf16_stochastic_round(self) -> bool:
        """Whether bfloat16 parameters are rounded stochastically."""
        return self.defaults["bf16_stochastic_round"]

    @property
    def is_adamw(self) -> bool:
        """Whether weight decay is decoupled."""
        return self.DECOUPLED


class Adam8bit(_TensorRate, optim.Adam8bit):
    """Adam with 8-bit moments, one scale per 256 elements."""


class Adam4bit(_TensorRate, optim.Adam4bit):
    """Adam with 4-bit moments, one scale per 128 elements."""

    BLOCK: ClassVar = 128


class AdamFp8(_TensorRate, optim.AdamFp8):
    """Adam with float8 moments, one scale per 256 elements."""


class AdamW8bit(_TensorRate, optim.AdamW8bit):
    """AdamW with 8-bit moments, one scale per 256 elements."""


class AdamW4bit(_TensorRate, optim.AdamW4bit):
    """AdamW with 4-bit moments, one scale per 128 elements."""

    BLOCK: ClassVar = 128


class AdamWFp8(_TensorRate, optim.AdamWFp8):
    """AdamW with float8 moments, one scale per 256 elements."""


class _AdamW(_TensorRate, _Decoupled):
    """AdamW with float32 states, for quantized parameters; bit-identical to torch.optim for the others."""

    BITS: ClassVar = "8bit"
    LEAST: ClassVar[float] = math.inf

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, bf16_stochastic_round: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, bf16_stochastic_round=bf16_stochastic_round)
