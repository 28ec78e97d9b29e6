"""A QuantOptimizer from configs with filters over modules (torchao.prototype.parq.api)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .affine_quantizers import StretchedUnifTorchaoQuantizer, UnifTorchaoQuantizer
from .optimizer import QuantOptimizer
from .prox_maps import ProxHardQuant
from .quantizers import Quantizer

__all__ = ["QuantConfig", "create_optimizer", "create_param_groups_and_group_quantizer_map"]

Selection = Sequence[tuple["QuantConfig", Callable[[nn.Module, str], bool]]]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """Bits of a group of parameters, elements that share a scale (None: the row), and the quantizer.

    quantizer None: the stretched grid for 2 and 3 bits, else signed integers.
    """

    bitwidth: int
    group_size: int | None = None
    quantizer: Quantizer | None = None

    def __post_init__(self) -> None:
        if self.bitwidth < 2:
            raise ValueError(f"QuantConfig: bitwidth must be >= 2, got {self.bitwidth}")
        if self.group_size is not None and self.group_size <= 0:
            raise ValueError(f"QuantConfig: group_size must be positive, got {self.group_size}")
        if self.quantizer is None:
            low = self.bitwidth in (2, 3)
            chosen = StretchedUnifTorchaoQuantizer(b=self.bitwidth) if low else UnifTorchaoQuantizer()
            object.__setattr__(self, "quantizer", chosen)


def create_param_groups_and_group_quantizer_map(
    model: nn.Module, quant_configs_and_filter_fns: Selection
) -> tuple[list[dict[str, Any]], dict[int, Quantizer]]:
    """Parameter groups for an optimizer, and the quantizers of the first ones by position.

    A parameter belongs to the config whose filter(module that owns it, its full name) is true. The others are a last
    group without weight decay. Groups without parameters are left out. What each parameter got is logged at level INFO.
    Raises ValueError if two filters match a parameter.
    """
    groups: list[dict[str, Any]] = []
    for config, _ in quant_configs_and_filter_fns:
        group: dict[str, Any] = {"params": [], "quant_bits": config.bitwidth}
        if config.group_size is not None:
            group["quant_block_size"] = config.group_size
        groups.append(group)
    rest: list[Tensor] = []
    for name, p in model.named_parameters():  # each once, though several modules may share it
        owner = model.get_submodule(name.rpartition(".")[0])
        found = [i for i, (_, wanted) in enumerate(quant_configs_and_filter_fns) if wanted(owner, name)]
        if len(found) > 1:
            several = [quant_configs_and_filter_fns[i][0] for i in found]
            raise ValueError(f"Found multiple matching configs for {name}: {several}; make their filters disjoint")
        (groups[found[0]]["params"] if found else rest).append(p)
        log.info(
            "%s of %s: %s", name, type(owner).__name__, quant_configs_and_filter_fns[found[0]][0] if found else "-"
        )
    pairs = zip(groups, quant_configs_and_filter_fns, strict=True)
    used = [(group, config.quantizer) for group, (config, _) in pairs if group["params"]]
    quantizers = {i: quantizer for i, (_, quantizer) in enumerate(used) if quantizer is not None}
    last = [{"params": rest, "weight_decay": 0.0}] if rest else []
    return [group for group, _ in used] + last, quantizers


def create_optimizer(
    model: nn.Module, quant_configs_and_filter_fns: Selection, base_optimizer_cls: type[torch.optim.Optimizer],
    base_optimizer_kwargs: dict[str, Any], *, warmup_steps: int = 0, quant_period: int = 1,
    quant_per_channel: bool = True,
) -> QuantOptimizer:  # fmt: skip
    """A QuantOptimizer that rounds at every step (ProxHardQuant), over ``base_optimizer_cls(groups, **kwargs)``."""
    groups, quantizers = create_param_groups_and_group_quantizer_map(model, quant_configs_and_filter_fns)
    return QuantOptimizer(
        base_optimizer_cls(groups, **base_optimizer_kwargs), UnifTorchaoQuantizer(), ProxHardQuant(), warmup_steps,
        quant_period, quant_per_channel, group_quantizer_map=quantizers,
    )  # fmt: skip
