"""Distillation losses with the float model as teacher; the training loop is the user's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...core.model_arguments import check_model

KINDS = ("kl", "mse")


def distillation_loss(
    output: Any, reference: Any, *, kind: str = "kl", temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Divergence of a model's output from its teacher's: a differentiable scalar.

    output, reference  logits [.., classes], or an object with ``.logits``; else its first float tensor is used
    kind               "kl": T^2 mean KL(softmax(reference / T) || softmax(output / T)) over all but the last axis, in
                       nats (Hinton et al. 2015). "mse": mean squared difference divided by mean squared reference
    mask               selects valid entries; shape of the output without the last axis

    Raises ValueError if the shapes or the mask do not match.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    x, y = _tensor(output).float(), _tensor(reference).detach().float()
    if x.shape != y.shape:
        raise ValueError(f"the model's output has shape {tuple(x.shape)}, the teacher's {tuple(y.shape)}")
    if mask is not None:
        if mask.shape != x.shape[:-1]:
            raise ValueError(f"mask has shape {tuple(mask.shape)}, expected {tuple(x.shape[:-1])}")
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
    """A frozen copy of a model in eval mode, made before the model is prepared.

        teacher = Teacher(model)
        quantize_(model, QATConfig(config, step="prepare"))
        loss = teacher.loss(model(x), x)

    ``copies=False`` uses the model itself, which then must not be trained.
    """

    def __init__(self, model: nn.Module, *, copies: bool = True) -> None:
        check_model("model", model)
        self.model = (copy.deepcopy(model) if copies else model).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the float model."""
        return self.model(*args, **kwargs)

    def loss(
        self, output: Any, *args: Any, kind: str = "kl", temperature: float = 1.0, mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """:func:`distillation_loss` between an output and the teacher's output for the inputs ``args``, ``kwargs``."""
        return distillation_loss(output, self(*args, **kwargs), kind=kind, temperature=temperature, mask=mask)
