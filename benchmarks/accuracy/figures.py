"""What is measured of a quantized model's outputs beside the float model's: pure functions, in float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Figures:
    """Measures of one model.

    per_sequence  measure -> its mean in each sequence (window of bytes, sentence, picture), for the bootstrap
    values        measure -> one number
    """

    per_sequence: dict[str, list[float]]
    values: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def classification(reference: Tensor, logits: Tensor, targets: Tensor | None = None) -> Figures:
    """Of logits [sequences, positions, classes]: KL(float ‖ quantized) in nats, flips of the best class, and the root
    mean square error of the probabilities. targets: int64, as the logits without classes, -1 where there is none; then
    also the change of the negative log likelihood, and both perplexities.

    Raises ValueError for other shapes, and for outputs that are not finite.
    """
    # here: peers' interpreters read this file and may not have it
    from pennyweight.report.metrics import perplexity, token_figures

    check_outputs(reference, logits)
    classes = reference.shape[-1]
    labels = None if targets is None else targets.clamp_min(0).flatten()
    tokens = token_figures(reference.reshape(-1, classes), logits.reshape(-1, classes), labels)
    kl = tokens.kl.view(reference.shape[:-1])
    # one sequence after the other: a copy of logits of a real vocabulary takes a gigabyte
    square = sum(
        float((a.softmax(-1) - b.softmax(-1)).square().sum(dtype=torch.float64))
        for a, b in zip(reference, logits, strict=True)
    )
    values = {
        "kl": float(tokens.kl.mean()),
        "kl median": float(tokens.kl.median()),
        "kl p99": float(tokens.kl.quantile(0.99)),
        "kl p99.9": float(tokens.kl.quantile(0.999)),
        "kl max": float(tokens.kl.max()),
        "flips": float((~tokens.same_top).double().mean()),
        "rms dp": (square / reference.numel()) ** 0.5,
    }
    if targets is not None and tokens.nll is not None and tokens.nll_quantized is not None:
        known = targets.flatten() >= 0
        before, after = tokens.nll[known], tokens.nll_quantized[known]
        values |= {
            "nll change": float((after - before).mean()), "perplexity": perplexity(after),
            "float perplexity": perplexity(before),
        }  # fmt: skip
    return Figures({"kl": kl.mean(-1).tolist()}, values)


def embeddings(reference: Tensor, got: Tensor) -> Figures:
    """Of vectors [texts, dims]: 1 - cosine of each text with itself, and what became of their similarities.

    Similarities are those of all pairs of different texts: Spearman's correlation, how many of the ten nearest stay,
    and KL between softmax(similarities / 0.05) of every text as a query.
    """
    from pennyweight.report.metrics import retrieval_kl

    check_outputs(reference, got)
    a, b = (nn.functional.normalize(x.double(), dim=-1) for x in (reference, got))
    away = (a - b).square().sum(-1) / 2  # 1 - cosine, without its rounding
    n = a.shape[0]
    others = ~torch.eye(n, dtype=torch.bool)
    sa, sb = ((x @ x.T)[others].view(n, n - 1) for x in (a, b))
    kl = retrieval_kl(reference, got)
    k = min(10, n - 1)
    kept = [
        len(set(x) & set(y)) / k for x, y in zip(sa.topk(k).indices.tolist(), sb.topk(k).indices.tolist(), strict=True)
    ]
    upper = torch.triu_indices(n, n, 1)
    values = {
        "1-cos": float(away.mean()),
        "1-cos p99": float(away.quantile(0.99)),
        "kl": float(kl.mean()),
        "spearman": spearman((a @ a.T)[upper[0], upper[1]], (b @ b.T)[upper[0], upper[1]]),
        "top-10 overlap": sum(kept) / n,
    }
    return Figures({"1-cos": away.tolist(), "kl": kl.tolist()}, values)


def spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of ranks; equal values share the mean of their ranks."""
    ra, rb = (_ranks(x) for x in (a, b))
    ra, rb = ra - ra.mean(), rb - rb.mean()
    return float((ra * rb).sum() / (ra.norm() * rb.norm()))


def _ranks(x: Tensor) -> Tensor:
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def check_outputs(reference: Tensor, got: Tensor) -> None:
    """Raise ValueError for other shapes, and for outputs that are not finite."""
    if reference.shape != got.shape:
        raise ValueError(f"outputs have shape {list(got.shape)}, those of the float model {list(reference.shape)}")
    if not bool(got.isfinite().all()):
        raise ValueError(f"{int((~got.isfinite()).sum())} of {got.numel()} outputs are not finite")
