"""Batches of inputs, the outputs that are compared, and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..support.arguments import show
from ..support.errors import ArgumentTypeError
from .comparison import Perplexity
from .metrics import (
    bootstrap,
    cosine,
    distribution,
    energies,
    next_tokens,
    pooled,
    retrieval_kl,
    same_nearest,
    token_figures,
)

KINDS = ("logits", "embeddings", "tensor")
LABELS = ("next", "same", "none")
MASKS = ("decoder_attention_mask", "attention_mask")


# -- batches ---------------------------------------------------------------------------------------------------------


def batches_of(batches: Any) -> Iterable[Any]:
    """An iterable of batches; a single tensor or mapping is one batch. Raises ValueError for other types."""
    if isinstance(batches, (Tensor, Mapping)):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes)):
        raise ArgumentTypeError(
            f"batches must be a list of batches (tensors, tuples of arguments or mappings), got {show(batches)}"
        )
    return batches


def mask_of(batch: Any, shape: torch.Size) -> Tensor | None:
    """The mask [B, T] of the tokens that count, if the batch has one."""
    for name in MASKS:
        mask = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.shape == shape:
            return mask.bool()
    return None


def counting(batch: Any, output: Tensor) -> Tensor:
    """The rows of a layer's output [B, T, ..] or [B · T, ..] whose tokens count; all if the batch has no mask."""
    masks = [m for n in MASKS if isinstance(batch, Mapping) and isinstance(m := batch.get(n), Tensor) and m.ndim == 2]
    if output.ndim > 2:
        masks = [m for m in masks if m.shape == output.shape[:2]]
        return output[masks[0].bool().to(output.device)] if len(masks) == 1 else output
    masks = [m for m in masks if m.numel() == len(output)] if output.ndim == 2 else []
    return output[masks[0].bool().flatten().to(output.device)] if len(masks) == 1 else output


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """The models in eval mode, without gradients; restores each module's training mode."""
    was = [(m, m.training) for model in models for m in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in was:
            module.training = training


# -- outputs ---------------------------------------------------------------------------------------------------------


def kind_of_output(output: Any, otherwise: str = "tensor") -> str:
    """ "logits" for an object with ``logits``; else ``otherwise``."""
    return "logits" if _field(output, "logits") is not None else otherwise


def logits_of(output: Any) -> Tensor:
    """The logits [.., V] of an output. Raises ValueError if there are none."""
    found = _field(output, "logits")
    tensors = floats(output) if found is None else [found]
    if not tensors or tensors[0].ndim < 2:
        raise ValueError(f"kind='logits' needs a tensor [.., classes] or an object with .logits, got {_say(output)}")
    return tensors[0]


def embeddings_of(output: Any, batch: Any, pooling: str) -> Tensor:
    """[B, D]: a tensor of that shape unchanged, hidden states [B, T, D] pooled. Raises ValueError for anything else."""
    found = next((t for n in ("sentence_embedding", "last_hidden_state") if (t := _field(output, n)) is not None), None)
    if found is None and _field(output, "logits") is None:
        found = next(iter(floats(output)), None)
    if found is None or found.ndim not in (2, 3):
        raise ValueError(
            f"kind='embeddings' needs a tensor [B, D] or [B, T, D], or an object with last_hidden_state, "
            f"got {_say(output)}"
        )
    return found if found.ndim == 2 else pooled(found, mask_of(batch, found.shape[:2]), pooling)


def floats(output: Any) -> list[Tensor]:
    """All floating-point tensors of an output."""
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def _field(output: Any, name: str) -> Any:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _say(output: Any) -> str:
    shapes = ", ".join(str(list(t.shape)) for t in floats(output)[:3]) or "no floating-point tensor"
    return f"{type(output).__name__} of {shapes}"


# -- labels ----------------------------------------------------------------------------------------------------------


def labels_rule(model: nn.Module, labels: str | None) -> str:
    """ "next": position t predicts the next token; "same": the batch's "labels" are aligned with the rows; "none".

    None: "next" for a decoder-only model of transformers, else "same", which uses labels if a batch has them.
    """
    if labels is not None:
        if labels not in LABELS:
            raise ValueError(f"labels must be one of {', '.join(LABELS)}, or None to detect it, got {labels!r}")
        return labels
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    can_generate = getattr(model, "can_generate", None)
    return "next" if callable(can_generate) and can_generate() and not encoder_decoder else "same"


def labels_of(batch: Any, rule: str, shape: torch.Size) -> tuple[Tensor, Tensor] | None:
    """(labels, mask) for rows of logits of that shape; None if the batch has none."""
    mapping = batch if isinstance(batch, Mapping) else {}
    found = mapping.get("labels")
    if rule == "next":
        if found is None:
            first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
            found = mapping.get("input_ids") if mapping else first
        if isinstance(found, Tensor) and found.shape == shape and found.ndim == 2 and not found.is_floating_point():
            return next_tokens(found, mask_of(batch, shape))
        return None
    if rule == "none" or not isinstance(found, Tensor) or found.shape != shape or found.is_floating_point():
        return None
    counts = found >= 0  # -100 is torch's ignore_index
    return found.masked_fill(~counts, 0), counts


# -- sums ------------------------------------------------------------------------------------------------------------


@dataclass
class Sums:
    """Accumulated metrics of both models' outputs: numbers per token, no activations."""

    kind: str
    rule: str
    pooling: str
    signal: float = 0.0
    noise: float = 0.0
    sequences: int = 0
    rows: int = 0
    cosines: list[Tensor] = field(default_factory=list)
    kl: list[Tensor] = field(default_factory=list)
    same: list[Tensor] = field(default_factory=list)
    by_sequence: list[Tensor] = field(default_factory=list)  # [sequences, (kl, rows, nll, nll_q, labels)]
    embeddings: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def add(self, batch: Any, exact: Any, found: Any) -> None:
        """Add the outputs of one batch. Raises ValueError if they cannot be compared."""
        take: dict[str, Callable[[Any], list[Tensor]]] = {
            "logits": lambda o: [logits_of(o)],
            "embeddings": lambda o: [embeddings_of(o, batch, self.pooling)],
            "tensor": floats,
        }
        a, b = take[self.kind](exact), take[self.kind](found)
        if not a or [t.shape for t in a] != [t.shape for t in b]:
            raise ValueError(f"the models' outputs cannot be compared: {_say(exact)} and {_say(found)}")
        self.sequences += a[0].shape[0] if a[0].ndim else 1
        for x, y in zip(a, b, strict=True):
            self._rows(batch, x, y.to(x.device))
        if self.kind == "embeddings":
            self.embeddings[0].append(a[0].cpu())
            self.embeddings[1].append(b[0].cpu())

    def _rows(self, batch: Any, x: Tensor, y: Tensor) -> None:
        x, y = (t if t.ndim > 1 else t.reshape(-1, 1) for t in (x, y))
        lead = x.shape[:-1]
        mask = mask_of(batch, x.shape[:2]) if self.kind != "embeddings" and x.ndim > 2 else None
        mask = torch.ones(lead, dtype=torch.bool) if mask is None else mask.cpu()
        mask = mask.reshape(*mask.shape, *(1,) * (len(lead) - mask.ndim)).expand(lead)
        at = mask.to(x.device)
        rows, rows_q = x[at], y[at]
        signal, noise = energies(rows, rows_q)
        self.signal, self.noise = self.signal + signal, self.noise + noise
        self.rows += rows.shape[0]
        self.cosines.append(cosine(rows.cpu(), rows_q.cpu()))
        if self.kind == "logits":
            self._distributions(batch, mask, rows, rows_q)

    def _distributions(self, batch: Any, mask: Tensor, rows: Tensor, rows_q: Tensor) -> None:
        labels = labels_of(batch, self.rule, mask.shape)
        counts = torch.zeros_like(mask) if labels is None else labels[1].cpu() & mask
        found = token_figures(rows, rows_q, None if labels is None else labels[0].cpu()[mask])
        self.kl.append(found.kl)
        self.same.append(found.same_top)
        none = torch.zeros(rows.shape[0], dtype=torch.float64)
        here = counts[mask].double()
        nll, nll_q = (none if n is None else torch.where(here > 0, n, none) for n in (found.nll, found.nll_quantized))
        of = torch.arange(mask.shape[0]).reshape(-1, *(1,) * (mask.ndim - 1)).expand(mask.shape)[mask]
        columns = torch.stack([found.kl, torch.ones_like(none), nll, nll_q, here], 1)
        self.by_sequence.append(columns.new_zeros(mask.shape[0], 5).index_add_(0, of, columns))

    # -- results -----------------------------------------------------------------------------------------------------

    def distributions(self, seed: int, temperature: float) -> tuple[Any, ...]:
        """(kl, its interval, top1, perplexity); None for metrics that the outputs do not have."""
        if self.kind == "logits":
            table = torch.cat(self.by_sequence)
            several = bool((table[:, 1] > 0).sum() > 1)
            interval = bootstrap(table[:, 0], table[:, 1], seed=seed) if several else None
            same = torch.cat(self.same).double()
            top1 = float(same.mean()) if same.numel() else math.nan
            return distribution(torch.cat(self.kl)), interval, top1, _perplexity(table, seed)
        if self.kind == "embeddings":
            a, b = map(torch.cat, self.embeddings)
            kl = retrieval_kl(a, b, temperature)
            return distribution(kl), bootstrap(kl, seed=seed), same_nearest(a, b), None
        return None, None, None, None


def _perplexity(table: Tensor, seed: int) -> Perplexity | None:
    tokens = int(table[:, 4].sum())
    if tokens == 0:
        return None
    used = table[table[:, 4] > 0]
    nll, nll_q = float(used[:, 2].sum()) / tokens, float(used[:, 3].sum()) / tokens
    interval = None
    if len(used) > 1:
        low, high = bootstrap(used[:, 3] - used[:, 2], used[:, 4], seed=seed)
        interval = (exp(low), exp(high))
    return Perplexity(exp(nll), exp(nll_q), exp(nll_q - nll), interval, tokens)


def exp(x: float) -> float:
    """e to the x; inf on overflow."""
    return math.inf if x > 709 else math.exp(x)
