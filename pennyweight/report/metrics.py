"""How far one model's outputs are from another's: pure functions on tensors, computed in float64.

p is the float model's distribution, q the quantized one's. Logarithms are natural: nats. A mask is True where a row
counts. Nothing here needs more than torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURE = 0.05  # of softmax over cosine similarities, as contrastive training of sentence embedders has it
RESAMPLES = 2000
POOLINGS = ("mean", "first", "last")
_CHUNK = 1 << 22  # logits in float64 at a time


class Spread(NamedTuple):
    """Of a number of values: mean, median, 99th percentile (linear between neighbours, as numpy's), largest."""

    number: int
    mean: float
    median: float
    p99: float
    max: float


class TokenFigures(NamedTuple):
    """Of each row of logits, [rows]: KL(p || q) in nats, whether both have the same largest logit, and where labels are
    there -log p(label) and -log q(label)."""

    kl: Tensor
    same_top: Tensor
    nll: Tensor | None
    nll_quantized: Tensor | None


def spread(values: Tensor) -> Spread:
    """The spread of a 1-d tensor; all NaN for an empty one, or where one value is NaN."""
    values = values.detach().double().reshape(-1).sort().values
    n = values.numel()
    if n == 0 or bool(values.isnan().any()):
        return Spread(n, *(math.nan,) * 4)
    return Spread(n, float(values.mean()), _percentile(values, 0.5), _percentile(values, 0.99), float(values[-1]))


def _percentile(ascending: Tensor, q: float) -> float:
    """torch.quantile takes at most 2**24 values."""
    at = q * (ascending.numel() - 1)
    low = math.floor(at)
    a, b = float(ascending[low]), float(ascending[min(low + 1, ascending.numel() - 1)])
    return a if at == low else a + (b - a) * (at - low)


# -- distributions over classes or tokens ----------------------------------------------------------------------------


def kl_divergence(logits: Tensor, quantized: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) in nats, p = softmax(logits), q = softmax(quantized): [.., V] -> [..].

    Classes that p rules out (-inf) add nothing; those that q alone rules out make it inf.
    """
    if logits.shape != quantized.shape:
        raise ValueError(f"logits of both must have one shape, got {list(logits.shape)} and {list(quantized.shape)}")
    width = logits.shape[-1]
    return token_figures(logits.reshape(-1, width), quantized.reshape(-1, width)).kl.reshape(logits.shape[:-1])


def token_figures(logits: Tensor, quantized: Tensor, labels: Tensor | None = None) -> TokenFigures:
    """Figures of each row in one pass: logits [rows, V] of both models, labels [rows] or None."""
    kl, top, nll, nll_q = [], [], [], []
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        part = slice(start, start + step)
        a, b = logits[part], quantized[part].to(logits.device)
        log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q))
        kl.append(terms.sum(-1).clamp(min=0))  # rounding leaves -1e-17 where both are equal; NaN passes
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
    """Share of rows [.., V] whose largest logit is at the same place in both; NaN where there is no row."""
    same = (logits.argmax(-1) == quantized.argmax(-1)).double()
    same = same if mask is None else same[mask.bool()]
    return float(same.mean()) if same.numel() else math.nan


def perplexity(nll: Tensor) -> float:
    """exp(mean(-log p(label))) of the rows that count."""
    return float(nll.double().mean().exp()) if nll.numel() else math.nan


def next_tokens(ids: Tensor, mask: Tensor | None = None, ignored: int = -100) -> tuple[Tensor, Tensor]:
    """(labels [B, T], mask [B, T]) of a causal model: position t is to tell ids[t + 1], where both are no padding."""
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    real = real & (ids != ignored)
    labels, counts = torch.zeros_like(ids), torch.zeros_like(real)
    labels[:, :-1] = ids[:, 1:]
    counts[:, :-1] = real[:, 1:] & (real[:, :-1] if mask is None else mask.bool()[:, :-1])
    return labels.masked_fill(~counts, 0), counts


# -- tensors ---------------------------------------------------------------------------------------------------------


def cosine(reference: Tensor, quantized: Tensor) -> Tensor:
    """a·b / (|a| |b|) of each row: [.., D] -> [..]. 1 where both are zero, 0 where one is."""
    a, b = reference.double(), quantized.to(reference.device).double()
    na, nb = a.norm(dim=-1), b.norm(dim=-1)
    value = (a * b).sum(-1) / (na * nb).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where((na == 0) & (nb == 0), torch.ones_like(value), value)


def relative_error(reference: Tensor, quantized: Tensor) -> float:
    """|b - a| / |a|, Euclidean norms of all elements; inf for another shape, 0 where both are zero."""
    return ratio(*energies(reference, quantized))


def sqnr(reference: Tensor, quantized: Tensor) -> float:
    """Signal to quantization noise, 10 log10(|a|² / |b - a|²) in dB; inf where equal."""
    return decibels(*energies(reference, quantized))


def energies(reference: Tensor, quantized: Tensor) -> tuple[float, float]:
    """(|a|², |b - a|²) where a is finite: what sums over batches. Noise is inf for another shape."""
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
    """sqrt(noise / signal): the relative error of these energies."""
    if math.isnan(noise):
        return math.nan
    return math.sqrt(noise / signal) if signal > 0 else (math.inf if noise > 0 else 0.0)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf where there is nothing but noise, or it is not finite."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def pooled(hidden: Tensor, mask: Tensor | None = None, how: str = "mean") -> Tensor:
    """Hidden states [B, T, D] as one vector a sequence [B, D]: the mean over its tokens, or its first or last one."""
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
    """What quantization did to neighbours, per query, in nats: embeddings [N, D] of both models -> [N].

        KL(softmax(S / temperature) || softmax(S_q / temperature)),  S_ij = cos(x_i, x_j), j != i

    It plays the part for embedders that the KL of next tokens plays for language models. Needs N >= 3: over one
    neighbour both distributions are 1.
    """
    if reference.ndim != 2 or reference.shape[0] != quantized.shape[0]:
        shapes = f"{list(reference.shape)} and {list(quantized.shape)}"
        raise ValueError(f"retrieval_kl takes one embedding a row of both models, [N, D], got {shapes}")
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
    """Share of embeddings [N, D] whose nearest other one, by cosine, is the same in both models."""
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


# -- how sure it is --------------------------------------------------------------------------------------------------


def bootstrap(
    sums: Tensor,
    counts: Tensor | None = None,
    *,
    resamples: int = RESAMPLES,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """The interval that holds ``level`` of the means over resampled sequences: (low, high).

    sums    [sequences]: of a figure over each sequence's tokens; counts: its tokens, default one each
    seed    of the resampling: same figures, same interval

    Sequences are drawn with replacement, whole, since tokens of one sequence are no independent samples; the figure is
    sum(sums) / sum(counts). Paired: each sequence brings what both models made of it, so pass differences
    (nll_q - nll, or kl_a - kl_b of two quantized models) and see whether the interval excludes 0.
    """
    sums = sums.detach().cpu().double().reshape(-1)
    counts = torch.ones_like(sums) if counts is None else counts.detach().cpu().double().reshape(-1)
    n = sums.numel()
    if n == 0 or not 0 < level < 1 or resamples < 1:
        raise ValueError(f"bootstrap needs sequences, resamples and 0 < level < 1, got {n}, {resamples} and {level}")
    random = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, step := max(1, _CHUNK // n)):
        drawn = torch.randint(n, (min(step, resamples - start), n), generator=random)
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    values = torch.cat(means).sort().values
    if bool(values.isnan().any()):
        return math.nan, math.nan
    return _percentile(values, (1 - level) / 2), _percentile(values, (1 + level) / 2)
