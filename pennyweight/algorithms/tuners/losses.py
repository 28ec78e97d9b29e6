"""How far two models' outputs are apart: one number, differentiable, for whatever a model puts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...quantize.run_batch import run_batch, token_mask
from ..calibration.block_order import inference_mode

Divergence = Callable[[Any, Any, Any], Tensor]  # (reference output, output, batch) -> scalar


def kl(reference: Any, output: Any, batch: Any) -> Tensor:
    """Mean over the tokens that count of KL(p || q) = sum p (log p - log q), in nats, of the softmax of the logits."""
    p, q = (_logits(out).float() for out in (reference, output))
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    found = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    mask = token_mask(batch)
    return found[mask].mean() if mask is not None and mask.shape == found.shape else found.mean()


def squared_error(reference: Any, output: Any, batch: Any) -> Tensor:
    """|y - y_float|^2 / |y_float|^2 over the first floating-point tensor that the model puts out; padding left out."""
    x, y = (first_tensor(out).float() for out in (reference, output))
    mask = token_mask(batch)
    if mask is not None and mask.shape == x.shape[:2]:
        x, y = x[mask], y[mask]
    return (y - x).square().sum() / x.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


NAMED: dict[str, Divergence] = {"kl": kl, "error": squared_error}


def divergence(metric: str | Divergence | None, example: Any) -> Divergence:
    """By name; None: "kl" for an output with logits, else "error". Raises ValueError for another name, or "kl" of an
    output without logits."""
    if callable(metric):
        return metric
    name = metric or ("kl" if _has_logits(example) else "error")
    if name not in NAMED:
        raise ValueError(
            f"unknown metric {name!r}; known: {', '.join(NAMED)}, or a function (reference, output, batch)"
        )
    if name == "kl" and not _has_logits(example) and not isinstance(example, Tensor):
        raise ValueError(f"metric 'kl' needs logits, and the model puts out {type(example).__name__}; take 'error'")
    return NAMED[name]


def first_tensor(output: Any) -> Tensor:
    """The first floating-point tensor of a model's output."""
    for leaf in tree_leaves(dict(output) if hasattr(output, "keys") else output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise ValueError(f"the model puts out no floating-point tensor but {type(output).__name__}")


def references(model: nn.Module, batches: Sequence[Any]) -> list[Any]:
    """What the model puts out for each batch, reduced to the tensor that is compared. Raises ValueError for NaN, inf:
    nothing can be nearer to them."""
    with inference_mode(model):
        return [finite(subsample(run_batch(model, batch)), model, batch) for batch in batches]


def finite(output: Tensor, model: nn.Module, batch: Any) -> Tensor:
    """The output of the float model as it is. Raises ValueError where it has NaN or inf; -inf is a logit like another,
    and padding does not count."""
    mask = token_mask(batch)
    seen = output[mask] if mask is not None and mask.shape == output.shape[:2] else output
    bad = int((seen.isnan() | seen.isposinf()).sum())
    if bad:
        raise ValueError(
            f"{type(model).__name__} puts out {bad} NaN or infinite values of {seen.numel()} on the calibration data "
            "before it is quantized, so no distance from its outputs can be measured; take data on which it is finite"
        )
    return output


def subsample(output: Any) -> Any:
    """The part of an output that divergences look at."""
    return output.logits if _has_logits(output) else first_tensor(output)


def mean_divergence(model: nn.Module, batches: Sequence[Any], reference: Sequence[Any], metric: Divergence) -> float:
    """Mean divergence over batches from outputs made before."""
    with inference_mode(model):
        found = [float(metric(r, subsample(run_batch(model, b)), b)) for b, r in zip(batches, reference, strict=True)]
    return sum(found) / len(found)


def split_batches(batches: Sequence[Any], share: float) -> tuple[list[Any], list[Any]]:
    """(the rest, one in every 1 / share), at least one of each; spread, as batches often lie in order of length."""
    aside = min(max(1, round(share * len(batches))), len(batches) - 1)
    chosen = {(2 * i + 1) * len(batches) // (2 * aside) for i in range(aside)}
    return [b for i, b in enumerate(batches) if i not in chosen], [batches[i] for i in sorted(chosen)]


def _has_logits(output: Any) -> bool:
    return isinstance(getattr(output, "logits", None), Tensor)


def _logits(output: Any) -> Tensor:
    return output.logits if _has_logits(output) else output
