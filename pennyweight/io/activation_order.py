"""Undoes the activation order of GPTQ files where that is exact: the order moves into the layers before.

With activation order ("act-order", ``desc_act``) the input channels of a weight are stored sorted by group, and a
permutation p says which they are: stored[:, k] = W[:, p[k]]. Formats without such a permutation can store the weight as
it is if its inputs arrive in that order, that is, if the layers that produce them have their outputs permuted:

    W h = W[:, p] h[p],   h = act(G x) * (U x)   =>   h[p] = act(G[p] x) * (U[p] x)

Permuting rows is exact for groups along the rows. It is possible where each input channel is computed from one output
channel of the layers before: ``down_proj`` after ``gate_proj`` and ``up_proj``, ``fc2`` after ``fc1``; and ``o_proj``
after ``v_proj`` for a permutation within the heads, if each head has its own keys and values. The inputs of q, k, v,
gate and up are the residual stream, which all layers share: their order cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..core import blocks
from ..core.numerics import Parts
from ..core.tensor import AffineQuantizedTensor
from .lazy_checkpoint import Opened, StoredTensor
from .manifest import Meta, clean

# Layers whose inputs are, channel by channel, computed from outputs of others in the same module
_PRODUCERS: Mapping[str, tuple[str, ...]] = {
    "down_proj": ("gate_proj", "up_proj"),
    "fc2": ("fc1",),
    "o_proj": ("v_proj",),
}


def undo_activation_order(source: Opened) -> tuple[Opened, list[str]]:
    """The checkpoint with the order of some weights moved into the layers before; and the names of these weights. Reads
    nothing but permutations until a tensor is read."""
    tensors, done = dict(source.held), []
    for name, stored in source.held.items():
        if stored.meta is None or not stored.meta.perm or stored.meta.axes is not None:
            continue
        producers = _producers(name, source)
        if producers is None:
            continue
        perm = _permutation(stored)
        if name.rpartition(".weight")[0].endswith("o_proj") and not _within_heads(perm(), source.config or {}):
            continue
        meta = replace(stored.meta, perm=False)
        tensors[name] = replace(stored, kind=meta, read=_unordered(stored, meta), rows=None)
        for producer in producers:
            tensors[producer] = replace(tensors[producer], read=_permuted(tensors[producer], perm), rows=None)
        done.append(name)
    return (replace(source, held=tensors) if done else source), done


def _producers(name: str, source: Opened) -> list[str] | None:
    """Names of the tensors whose rows are the inputs of a weight; None if they are not known or cannot be permuted."""
    module, _, end = name.removesuffix(".weight").rpartition(".")
    layers = [f"{module}.{p}" if module else p for p in _PRODUCERS.get(end, ())]
    names = [n for layer in layers for n in (f"{layer}.weight", f"{layer}.bias") if n in source.held]
    inputs = source.held[name].kind.shape[1]
    if not layers or any(f"{layer}.weight" not in names for layer in layers):
        return None
    tied = {*source.aliases, *source.aliases.values()}
    return names if all(_rows_move(source.held[n], inputs) and n not in tied for n in names) else None


def _rows_move(stored: StoredTensor, rows: int) -> bool:
    """Whether permuting the rows of a tensor is exact."""
    meta, shape = stored.meta, stored.kind.shape
    if not shape or shape[0] != rows:
        return False
    if meta is None:
        return True
    alone = meta.spec.block is None or all(size == 1 for size in blocks.resolve(meta.spec.block, shape)[:-1])
    return meta.axes is None and len(shape) == 2 and alone and meta.spec.rows_independent(shape)


def _within_heads(perm: Tensor, config: Mapping[str, Any]) -> bool:
    """Whether a permutation keeps every channel in its attention head, and each head has its own values."""
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is not int or heads < 1 or (shared is not None and shared != heads) or len(perm) % heads:
        return False
    head = torch.arange(len(perm), dtype=perm.dtype, device=perm.device) // (len(perm) // heads)
    return torch.equal(perm // (len(perm) // heads), head)


def _permutation(stored: StoredTensor) -> Callable[[], Tensor]:
    @cache
    def perm() -> Tensor:
        found = _quantized(stored.read()).plain_parts().perm
        assert found is not None
        return found.long()

    return perm


def _unordered(stored: StoredTensor, meta: Meta) -> Callable[[], Tensor]:
    return lambda: _tensor(_quantized(stored.read()).plain_parts()._replace(perm=None), meta)


def _permuted(stored: StoredTensor, perm: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def read() -> Tensor:
        value = stored.read()
        if not isinstance(value, AffineQuantizedTensor):
            return value.index_select(0, perm())
        assert stored.meta is not None
        parts, rows = value.plain_parts(), stored.kind.shape[0]
        values = ("codes", "scale", "zero_point", "offset")  # the order of columns and the activation stay
        return _tensor(parts._replace(**{n: _rows(getattr(parts, n), perm(), rows) for n in values}), stored.meta)

    return read


def _rows(part: Any, perm: Tensor, rows: int) -> Any:
    """Permute the rows of a part that has one for each row of the weight; nested scales too."""
    if isinstance(part, Parts):
        return part._replace(**{name: _rows(getattr(part, name), perm, rows) for name in ("codes", "scale", "offset")})
    return part.index_select(0, perm) if isinstance(part, Tensor) and part.ndim and part.shape[0] == rows else part


def _tensor(parts: Parts, meta: Meta) -> Tensor:
    return AffineQuantizedTensor(parts, clean(meta.spec), meta.shape, meta.dtype, meta.act, meta.axes)


def _quantized(value: Tensor) -> AffineQuantizedTensor:
    assert isinstance(value, AffineQuantizedTensor)
    return value
