"""Distances between the outputs of two models: pure functions on tensors, computed in float64.

p is the float model's distribution, q the quantized one's. Logarithms are natural (nats). A mask is True for rows that
count. Depends on torch only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURE = 0.05  # of the softmax over cosine similarities, as in contrastive training of sentence embedders
RESAMPLES = 2000
POOLINGS = ("mean", "first", "last")
_CHUNK = 1 << 22  # logits in float64 at a time


class Distribution(NamedTuple):
    """Number of values, mean, median, 99th percentile (linear interpolation, as in numpy), maximum."""

    number: int
    mean: float
    median: float
    p99: float
    max: float


class TokenFigures(NamedTuple):
    """Per row of logits, [rows]: KL(p || q) in nats, whether both have the same argmax, and with labels -log p(label)
    and -log q(label)."""

    kl: Tensor
    same_top: Tensor
    nll: Tensor | None
    nll_quantized: Tensor | None


def distribution(values: Tensor) -> Distribution:
    """Mean, median, 99th percentile and maximum of a 1-d tensor; all NaN if it is empty or contains NaN."""
    values = values.detach().double().reshape(-1).sort().values
    n = values.numel()
    if n == 0 or bool(values.isnan().any()):
        return Distribution(n, *(math.nan,) * 4)
    return Distribution(n, float(values.mean()), _percentile(values, 0.5), _percentile(values, 0.99), float(values[-1]))


def _percentile(ascending: Tensor, q: float) -> float:
    """As torch.quantile, which is limited to 2**24 values."""
    at = q * (ascending.numel() - 1)
    low = math.floor(at)
    a, b = float(ascending[low]), float(ascending[min(low + 1, ascending.numel() - 1)])
    return a if at == low else a + (b - a) * (at - low)


# -- distributions over classes or tokens ----------------------------------------------------------------------------


def kl_divergence(logits: Tensor, quantized: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) in nats, p = softmax(logits), q = softmax(quantized): [.., V] -> [..].

    Classes with p = 0 (-inf) add nothing; classes with q = 0 and p > 0 make it inf.
    """
    if logits.shape != quantized.shape:
        raise ValueError(f"both logits must have the same shape, got {list(logits.shape)} and {list(quantized.shape)}")
    width = logits.shape[-1]
    return token_figures(logits.reshape(-1, width), quantized.reshape(-1, width)).kl.reshape(logits.shape[:-1])


def token_figures(logits: Tensor, quantized: Tensor, labels: Tensor | None = None) -> TokenFigures:
    """Metrics of each row in one pass: logits [rows, V] of both models, labels [rows] or None."""
    kl, top, nll, nll_q = [], [], [], []
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        a, b = logits[part], quantized[part].to(logits.device)
        log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q))
        kl.append(terms.sum(-1).clamp(min=0))  # equal rows give -1e-17 by rounding; NaN is kept
        top.append(log_p.argmax(-1) == log_q.argmax(-1))
        if labels is not None:
            at = labels[part].to(log_p.device).long().unsqueeze(-1)
            nll.append(-log_p.gather(-1, at).squeeze(-1))
            nll_q.append(-log_q.gather(-1, at).squeeze(-1))
    return TokenFigures(
        _joined(kl), _joined(top, torch.bool), _joined(nll) if labels is not None else None,
        _joined(nll_q) if labels is not None else None,
    )  # fmt: skip


def _joined(pieces: list[Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat(pieces).cpu() if pieces else torch.zeros(0, dtype=dtype)


def top1_agreement(logits: Tensor, quantized: Tensor, mask: Tensor | None = None) -> float:
    """Share of rows [.., V] with the same argmax in both; NaN without rows."""
    same = (logits.argmax(-1) == quantized.argmax(-1)).double()
    same = same if mask is None else same[mask.bool()]
    return float(same.mean()) if same.numel() else math.nan


def perplexity(nll: Tensor) -> float:
    """exp(mean(-log p(label))) over the rows."""
    return float(nll.double().mean().exp()) if nll.numel() else math.nan


def next_tokens(ids: Tensor, mask: Tensor | None = None, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """(labels [B, T], mask [B, T]) of a causal model: position t predicts ids[t + 1]; padding is masked."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    real = real & (ids != ignored)
    labels, counts = torch.zeros_like(ids), torch.zeros_like(real)
    labels[:, :-1] = ids[:, 1:]
    counts[:, :-1] = real[:, 1:] & (real[:, :-1] if mask is None else mask.bool()[:, :-1])
    return labels.masked_fill(~counts, 0), counts


# -- tensors ---------------------------------------------------------------------------------------------------------


def cosine(reference: Tensor, quantized: Tensor) -> Tensor:
    """a·b / (|a| |b|) per row: [.., D] -> [..]. 1 if both are zero, 0 if one is."""
    a, b = reference.double(), quantized.to(reference.device).double()
    na, nb = a.norm(dim=-1), b.norm(dim=-1)
    value = (a * b).sum(-1) / (na * nb).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where((na == 0) & (nb == 0), torch.ones_like(value), value)


def relative_error(reference: Tensor, quantized: Tensor) -> float:
    """|b - a| / |a|, Euclidean norms over all elements; inf if the shapes differ, 0 if both are zero."""
    return ratio(*energies(reference, quantized))


def sqnr(reference: Tensor, quantized: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10(|a|² / |b - a|²) in dB; inf if equal."""
    return decibels(*energies(reference, quantized))


def energies(reference: Tensor, quantized: Tensor) -> tuple[float, float]:
    """(|a|², |b - a|²) over the finite elements of a; additive over batches. Noise is inf if the shapes differ."""
    if reference.shape != quantized.shape:
        return _square(reference), math.inf
    wide = torch.promote_types(torch.promote_types(reference.dtype, quantized.dtype), torch.float32)
    a, b = reference.to(wide), quantized.to(reference.device, wide)
    signal = _square(a)
    if not math.isfinite(signal):
        finite = torch.isfinite(a)
        a, b = a[finite], b[finite]
        signal = _square(a)
    return signal, _square(b - a)


def _square(x: Tensor) -> float:
    """|x|², summed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def ratio(signal: float, noise: float) -> float:
    """The relative error sqrt(noise / signal)."""
    if math.isnan(noise):
        return math.nan
    return math.sqrt(noise / signal) if signal > 0 else (math.inf if noise > 0 else 0.0)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf without signal or if the noise is not finite."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def pooled(hidden: Tensor, mask: Tensor | None = None, how: str = "mean") -> Tensor:
    """Hidden states [B, T, D] pooled to [B, D]: the mean over the tokens, or the first or last token."""
    if how not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {how!r}")
    real = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask.bool()
    real = real.to(hidden.device)
    if how == "mean":
        weight = real.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
    at = real.int().argmax(1) if how == "first" else real.shape[1] - 1 - real.flip(1).int().argmax(1)
    return hidden[torch.arange(hidden.shape[0], device=hidden.device), at]


def retrieval_kl(reference: Tensor, quantized: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """KL of the similarity distributions, per query, in nats: embeddings [N, D] of both models -> [N].

        KL(softmax(S / temperature) || softmax(S_q / temperature)),  S_ij = cos(x_i, x_j), j != i

    The equivalent for embedding models of the next-token KL of language models. Needs N >= 3: over a single neighbour
    both distributions are 1.
    """
    if reference.ndim != 2 or reference.shape[0] != quantized.shape[0]:
        shapes = f"{list(reference.shape)} and {list(quantized.shape)}"
        raise ValueError(f"retrieval_kl needs embeddings [N, D] of both models with equal N, got {shapes}")
    n = reference.shape[0]
    if n < 3:
        raise ValueError(f"retrieval_kl needs at least 3 embeddings, got {n}: with fewer there is nothing to rank")
    unit = [x.cpu().double() / x.cpu().double().norm(dim=-1, keepdim=True) for x in (reference, quantized)]
    step, out = max(1, _CHUNK // n), []
    for start in range(0, n, step):
        p, q = (x[start : start + step] @ x.T / temperature for x in unit)
        own = torch.arange(start, start + p.shape[0])
        for s in (p, q):
            s[torch.arange(p.shape[0]), own] = -math.inf
        out.append(token_figures(p, q).kl)
    return torch.cat(out)


def same_nearest(reference: Tensor, quantized: Tensor) -> float:
    """Share of embeddings [N, D] with the same nearest neighbour, by cosine, in both models."""
    nearest = []
    for x in (reference, quantized):
        unit = x.cpu().double() / x.cpu().double().norm(dim=-1, keepdim=True)
        step, found = max(1, _CHUNK // max(1, len(x))), []
        for start in range(0, len(x), step):
            s = unit[start : start + step] @ unit.T
            s[torch.arange(len(s)), torch.arange(start, start + len(s))] = -math.inf
            found.append(s.argmax(-1))
        nearest.append(torch.cat(found))
    return float((nearest[0] == nearest[1]).double().mean())


# -- confidence intervals --------------------------------------------------------------------------------------------


def bootstrap(
    sums: Tensor,
    counts: Tensor | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean over sequences: (low, high) contains ``level`` of the resampled means.

    sums    [sequences]: of a metric over each sequence's tokens; counts: its tokens, default one each
    seed    of the resampling; the result is deterministic

    Whole sequences are drawn with replacement, because tokens of one sequence are not independent samples. The
    statistic is sum(sums) / sum(counts). For a paired test pass differences (nll_q - nll, or kl_a - kl_b of two
    quantized models) and check whether the interval excludes 0.
    """
    sums = sums.detach().cpu().double().reshape(-1)
    counts = None if counts is None else counts.detach().cpu().double().reshape(-1)
    n = sums.numel()
    if n == 0 or not 0 < level < 1 or resamples < 1:
        raise ValueError(f"bootstrap needs sequences, resamples and 0 < level < 1, got {n}, {resamples} and {level}")
    random = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, step := max(1, _CHUNK // n)):
        drawn = torch.randint(n, (min(step, resamples - start), n), generator=random)
        means.append(sums[drawn].sum(1) / (n if counts is None else counts[drawn].sum(1)))
    values = torch.cat(means).sort().values
    if bool(values.isnan().any()):
        return math.nan, math.nan
    return _percentile(values, (1 - level) / 2), _percentile(values, (1 + level) / 2)
