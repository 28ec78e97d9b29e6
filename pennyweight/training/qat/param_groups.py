"""Optimizer parameter groups of a prepared model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...core.model_arguments import check_arguments
from .modules import fake_modules

IN_CODES = ("zero_point", "table")  # parts in units of their scale


@check_arguments()
def parameter_groups(
    model: nn.Module, lr: float, *, scale_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: matrices, vectors, and trained qparams, which have their own learning rate. Qparams
    have no weight decay, because it would shrink ranges; neither do vectors.

    scale_lr  of scales, offsets and ranges; default: a tenth of ``lr``. Adam changes each entry by about its rate,
              regardless of its magnitude, and a scale changes all weights of its block in proportion to their codes.
              Zero points and codebooks are in units of the scale: their rate is ``scale_lr`` over the mean scale
    """
    scale_lr = lr / 10 if scale_lr is None else scale_lr
    rates: dict[int, float] = {}
    for _, module in fake_modules(model):
        for param, fake in module.fake_quantized.items():
            original = module.held(param)
            unit = original["scale"].detach().float().abs().mean().item() if "scale" in original else 1.0
            for name in fake.learned:
                rates[id(original[name])] = scale_lr / (unit or 1.0) if name in IN_CODES else scale_lr
    trained = [p for p in model.parameters() if p.requires_grad]
    own = [p for p in trained if id(p) not in rates]
    beside = [p for p in trained if id(p) in rates]
    found = [
        {"params": [p for p in own if p.ndim > 1], "lr": lr, "weight_decay": weight_decay},
        {"params": [p for p in own if p.ndim <= 1], "lr": lr, "weight_decay": 0.0},
    ]
    for rate in dict.fromkeys(rates[id(p)] for p in beside):
        found.append({"params": [p for p in beside if rates[id(p)] == rate], "lr": rate, "weight_decay": 0.0})
    return [group for group in found if group["params"]]
