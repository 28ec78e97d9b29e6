"""Optimizers with one state: Lion, and SGD with momentum."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..kernels.cpu import abi
from .base import LowBitOptimizer, check_ways
from .update_rules import lion, sgd


class Lion8bit(LowBitOptimizer):
    """Lion (Chen et al. 2023) with 8-bit momentum, one scale per 256 elements. Weight decay is decoupled."""

    STATES: ClassVar = {"exp_avg": "signed"}
    BITS: ClassVar = "8bit"
    RULE: ClassVar = (lion, abi.RULE_LION)

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0, *, block_size: int = 256, bf16_stochastic_round: bool = False,
        maximize: bool = False, seed: int = 0, **ways: Any,
    ) -> None:  # fmt: skip
        check_ways(type(self).__name__, ways)
        defaults = {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "block_size": block_size,
            "bf16_stochastic_round": bf16_stochastic_round, "maximize": maximize, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    def numbers(self, group: dict[str, Any], step: int) -> list[float]:
        (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
        return [1 - lr * group["weight_decay"], 0.0, 1 - beta1, 1 - beta2, lr]


class SGD8bit(LowBitOptimizer):
    """torch.optim.SGD with 8-bit momentum, one scale per 256 elements. Requires momentum."""

    STATES: ClassVar = {"momentum_buffer": "signed"}
    BITS: ClassVar = "8bit"
    RULE: ClassVar = (sgd, abi.RULE_SGD)
    STEPLESS: ClassVar = True

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, momentum: float = 0.9, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, *, block_size: int = 256,
        bf16_stochastic_round: bool = False, maximize: bool = False, seed: int = 0, **ways: Any,
    ) -> None:  # fmt: skip
        check_ways(type(self).__name__, ways)
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "block_size": block_size, "bf16_stochastic_round": bf16_stochastic_round,
            "maximize": maximize, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        if not group["momentum"] > 0:
            raise ValueError(f"momentum must be positive, got {group['momentum']}; without it use torch.optim.SGD")
        if group["nesterov"] and group["dampening"]:
            raise ValueError(f"nesterov needs dampening 0, got {group['dampening']}")

    def numbers(self, group: dict[str, Any], step: int) -> list[float]:
        share = 1 if step == 1 else 1 - group["dampening"]  # torch.optim's first buffer is the gradient
        return [1.0, group["weight_decay"], group["momentum"], share, float(group["lr"])]
