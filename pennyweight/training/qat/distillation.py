"""Distillation: the float model as the teacher of the one that is trained. Losses, no loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

KINDS = ("kl", "mse")


def distillation_loss(
    output: Any, reference: Any, *, kind: str = "kl", temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """How far a model's output is from its teacher's: a scalar with a gradient.

    output, reference  logits [.., classes], or what has them as ``.logits``; else the first float tensor in it
    kind               "kl": T^2 mean KL(softmax(reference / T) || softmax(output / T)) over all but the last axis, in
                       nats (Hinton et al. 2015). "mse": mean square of the difference over that of the reference
    mask               of the shape without the last axis: which entries count

    Raises ValueError where the shapes differ or the mask does not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    x, y = _tensor(output).float(), _tensor(reference).detach().float()
    if x.shape != y.shape:
        raise ValueError(f"the model puts out {tuple(x.shape)}, its teacher {tuple(y.shape)}")
    if mask is not None:
        if mask.shape != x.shape[:-1]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, it must be {tuple(x.shape[:-1])}")
        x, y = x[mask.bool()], y[mask.bool()]
    if kind == "mse":
        return (x - y).square().mean() / y.square().mean().clamp_min(torch.finfo(torch.float32).tiny)
    q, p = (x / temperature).log_softmax(-1), (y / temperature).log_softmax(-1)
    found = F.kl_div(q, p, reduction="sum", log_target=True)
    return found * (temperature**2 / max(1, x.numel() // x.shape[-1]))


def _tensor(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(f"there is no floating-point tensor in {type(output).__name__}")


class Teacher:
    """A frozen copy of a model, in eval mode, from before it was prepared.

        teacher = Teacher(model)
        quantize_(model, QATConfig(config, step="prepare"))
        loss = teacher.loss(model(x), x)

    ``copies=False`` takes the model itself, one that is not going to be trained.
    """

    def __init__(self, model: nn.Module, *, copies: bool = True) -> None:
        self.model = (copy.deepcopy(model) if copies else model).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the float model puts out."""
        return self.model(*args, **kwargs)

    def loss(
        self, output: Any, *args: Any, kind: str = "kl", temperature: float = 1.0, mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """:func:`distillation_loss` of an output from this model's for the same inputs, ``args`` and ``kwargs``."""
        return distillation_loss(output, self(*args, **kwargs), kind=kind, temperature=temperature, mask=mask)
