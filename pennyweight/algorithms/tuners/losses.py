"""Differentiable divergence between the outputs of two models, for any output type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...planning.run_batch import token_mask
from ...support.arguments import did_you_mean
from ..calibration.batches import held_out_indices
from ..calibration.block_order import inference_mode
from ..calibration.disk_offload import offloaded
from ..calibration.float32_products import run_batch

Divergence = Callable[[Any, Any, Any], Tensor]  # (reference output, output, batch) -> scalar


def kl(reference: Any, output: Any, batch: Any) -> Tensor:
    """Mean over the tokens that count of KL(p || q) = sum p (log p - log q), in nats, of the softmax of the logits."""
    p, q = ((out.logits if _has_logits(out) else out).float() for out in (reference, output))
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    found = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    mask = token_mask(batch)
    return found[mask].mean() if mask is not None and mask.shape == found.shape else found.mean()


def squared_error(reference: Any, output: Any, batch: Any) -> Tensor:
    """|y - y_float|^2 / |y_float|^2 over the first floating-point tensor of the output, without padding."""
    x, y = (first_tensor(out).float() for out in (reference, output))
    mask = token_mask(batch)
    if mask is not None and mask.shape == x.shape[:2]:
        x, y = x[mask], y[mask]
    return (y - x).square().sum() / x.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


NAMED: dict[str, Divergence] = {"kl": kl, "error": squared_error}


def divergence(metric: str | Divergence | None, example: Any) -> Divergence:
    """A divergence by name; None: "kl" for an output with logits, else "error". Raises ValueError for an unknown name,
    or for "kl" if the output has no logits."""
    if callable(metric):
        return metric
    name = metric or ("kl" if _has_logits(example) else "error")
    if name not in NAMED:
        raise ValueError(
            f"unknown metric {name!r}{did_you_mean(name, NAMED)}; known: {', '.join(NAMED)}, or a function (reference, "
            "output, batch)"
        )
    if name == "kl" and not _has_logits(example) and not isinstance(example, Tensor):
        raise ValueError(f"metric 'kl' needs logits, but the model returns {type(example).__name__}; use 'error'")
    return NAMED[name]


def first_tensor(output: Any) -> Tensor:
    """The first floating-point tensor of a model's output."""
    for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(f"the model returns no floating-point tensor, only {type(output).__name__}")


def references(model: nn.Module, batches: Sequence[Any]) -> list[Any]:
    """The model's output for each batch, reduced to the compared tensor. Raises ValueError for NaN or inf, because no
    distance to them is defined."""
    with inference_mode(model):
        return [offloaded(finite(compared_tensor(run_batch(model, batch)), model, batch)) for batch in batches]


def finite(output: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """Check the output of the float model and return it. Raises ValueError for NaN or +inf; -inf is a valid logit, and
    padding does not count."""
    mask = token_mask(batch)
    seen = output[mask] if mask is not None and mask.shape == output.shape[:2] else output
    bad = int((seen.isnan() | seen.isposinf()).sum())
    if bad:
        raise ValueError(
            f"{type(model).__name__} returns {bad} NaN or infinite values of {seen.numel()} on the calibration data "
            "before quantization, so no distance to its outputs can be measured; use data with finite outputs"
        )
    return output


def compared_tensor(output: Any) -> Any:
    """The tensor of an output that divergences compare."""
    return output.logits if _has_logits(output) else first_tensor(output)


def mean_divergence(model: nn.Module, batches: Sequence[Any], reference: Sequence[Any], metric: Divergence) -> float:
    """Mean divergence over batches from precomputed reference outputs."""
    total = 0.0
    with inference_mode(model):
        for batch, expected in zip(batches, reference, strict=True):
            total += float(metric(expected, compared_tensor(run_batch(model, batch)), batch))
    return total / len(batches)


def split_batches(batches: Sequence[Any], share: float) -> tuple[list[Any], list[Any]]:
    """(training batches, held-out batches: one in every 1 / share), at least one of each; a single batch is both."""
    if len(batches) == 1:
        return list(batches), list(batches)
    chosen = held_out_indices(len(batches), share)
    return [b for i, b in enumerate(batches) if i not in chosen], [batches[i] for i in sorted(chosen)]


def _has_logits(output: Any) -> bool:
    return isinstance(getattr(output, "logits", None), Tensor)
