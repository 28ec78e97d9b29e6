"""Adam and AdamW with 8-bit, 4-bit and float8 states; Lion, and SGD with momentum, with 8-bit states."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..kernels.cpu import abi
from .base import LowBitOptimizer, check_ways
from .update_rules import adam, lion, sgd


class _Adam(LowBitOptimizer):
    STATES: ClassVar = {"exp_avg": "signed", "exp_avg_sq": "squares", "max_exp_avg_sq": "peaks"}
    RULE: ClassVar = (adam, abi.RULE_ADAM)
    DECOUPLED: ClassVar = False  # decoupled weight decay (on the parameter, not the gradient)
    BLOCK: ClassVar = 256

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, block_size: int | None = None,
        bf16_stochastic_round: bool = False, maximize: bool = False, seed: int = 0, **ways: Any,
    ) -> None:  # fmt: skip
        check_ways(type(self).__name__, ways)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "block_size": self.BLOCK if block_size is None else block_size,
            "bf16_stochastic_round": bf16_stochastic_round, "maximize": maximize, "seed": seed,
        }  # fmt: skip
        super().__init__(params, defaults)

    def names(self, group: dict[str, Any]) -> list[str]:
        return [*self.STATES][: 3 if group["amsgrad"] else 2]

    def check(self, group: dict[str, Any]) -> None:
        if not group["eps"] >= 0:
            raise ValueError(f"eps must not be negative, got {group['eps']}")

    def numbers(self, group: dict[str, Any], step: int) -> list[float]:
        (beta1, beta2), lr, decay = map(float, group["betas"]), float(group["lr"]), group["weight_decay"]
        corrected = lr / (1 - beta1**step)
        before = (1 - lr * decay, 0.0) if self.DECOUPLED else (1.0, decay)
        return [*before, 1 - beta1, beta2, 1 - beta2, (1 - beta2**step) ** 0.5, group["eps"], corrected]


class _AdamW(_Adam):
    DECOUPLED: ClassVar = True

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **more)


class Adam8bit(_Adam):
    """torch.optim.Adam with 8-bit moments, one scale per 256 elements: 0.254 of the state memory."""

    BITS: ClassVar = "8bit"


class Adam4bit(_Adam):
    """torch.optim.Adam with 4-bit moments, one scale per 64 elements: 0.141 of the state memory."""

    BITS: ClassVar = "4bit"
    BLOCK: ClassVar = 64


class AdamFp8(_Adam):
    """torch.optim.Adam with float8 moments, one scale per 256 elements: 0.254 of the state memory."""

    BITS: ClassVar = "fp8"


class AdamW8bit(_AdamW):
    """torch.optim.AdamW with 8-bit moments, one scale per 256 elements: 0.254 of the state memory."""

    BITS: ClassVar = "8bit"


class AdamW4bit(_AdamW):
    """torch.optim.AdamW with 4-bit moments, one scale per 64 elements: 0.141 of the state memory."""

    BITS: ClassVar = "4bit"
    BLOCK: ClassVar = 64


class AdamWFp8(_AdamW):
    """torch.optim.AdamW with float8 moments, one scale per 256 elements: 0.254 of the state memory."""

    BITS: ClassVar = "fp8"


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
