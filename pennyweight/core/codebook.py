"""Codebooks learned from a tensor: one code represents ``dim`` neighbours of a row.

    x[.., dim * i + j] = table[codes[.., i], j] * scale + offset

Fitting is deterministic: the same tensor gives the same table on every machine with the same arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLE = 1 << 15  # maximum number of vectors that a table is fitted to
SEEDED = 1 << 13  # maximum number of vectors used for seeding
_CHUNK = 1 << 22  # distances in memory at once
DTYPE = torch.float16  # of a table: its numbers are of the order of 1, precise to 2**-11
LIMIT = 65504.0  # the largest number of that dtype


def vectors(x: Tensor, dim: int) -> Tensor:
    """[.., n] as [.., ceil(n / dim), dim]; the last entry is repeated."""
    short = -x.shape[-1] % dim
    if short:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], -1)
    return x.unflatten(-1, (x.shape[-1] // dim, dim))


def numbers(codes: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """[.., m] -> [.., m * dim]: the numbers of the codes."""
    dim = table.shape[1]
    found = table.to(dtype)[codes.to(torch.int32)]
    return found.flatten(-2) if codes.ndim else found.reshape(()) if dim == 1 else found


def nearest(x: Tensor, table: Tensor, weight: Tensor | None = None) -> Tensor:
    """Index of the entry with the least sum_j weight_j (x_j - entry_j)^2, the first one in case of ties.

    x, weight: [.., dim]; table: [entries, dim]. Returns uint8 [..], int32 for more than 256 entries."""
    table = table.to(x.dtype)
    if table.shape[1] == 1 and x.dtype is not torch.float64:
        return _nearest_number(x.squeeze(-1), table.squeeze(-1))
    flat, out = x.reshape(-1, x.shape[-1]), []
    counts = None if weight is None else weight.reshape(flat.shape)
    squares = table.square()
    for begin in range(0, flat.shape[0], max(1, _CHUNK // len(table))):
        rows = slice(begin, begin + max(1, _CHUNK // len(table)))
        y = flat[rows]
        if counts is None:
            cost = torch.addmm(squares.sum(1), y, table.t(), alpha=-2)
        else:
            cost = torch.addmm(counts[rows] @ squares.t(), counts[rows] * y, table.t(), alpha=-2)
        out.append(cost.argmin(1).to(_index_dtype(table)))
    codes = torch.cat(out) if out else torch.empty(0, dtype=_index_dtype(table), device=x.device)
    return codes.reshape(x.shape[:-1])


def _nearest_number(x: Tensor, table: Tensor) -> Tensor:
    levels, order = table.sort(stable=True)
    between = (levels[1:] + levels[:-1]) / 2
    return order[torch.bucketize(x.contiguous(), between)].to(_index_dtype(table))


def _index_dtype(table: Tensor) -> torch.dtype:
    return torch.uint8 if len(table) <= 256 else torch.int32


def fit(x: Tensor, entries: int, weight: Tensor | None = None, rounds: int = 12) -> Tensor:
    """Weighted k-means: a table [entries, dim] that minimises the sum of weight_j (x_j - nearest entry_j)^2.

    x, weight: [m, dim], weights not negative. k-means++ (Arthur and Vassilvitskii 2007) from a fixed seed, then Lloyd
    iterations; unused entries are replaced by the vectors with the largest error. If there are more than
    :data:`SAMPLE` vectors, an evenly spaced subset is used.
    """
    if x.is_meta or not len(x):
        return x.new_zeros((entries, x.shape[-1]))
    step = math.ceil(len(x) / SAMPLE)
    x = x[::step].float()
    weight = None if weight is None else weight[::step].float()
    if weight is not None and not bool((weight > 0).any()):
        weight = None
    table = _seed(x, entries, weight)
    least, best = math.inf, table
    for _ in range(rounds):
        codes = nearest(x, table, weight).long()
        apart = (x - table[codes]).square() * (1 if weight is None else weight)
        cost = float(apart.sum(dtype=torch.float64))
        if cost < least:
            least, best = cost, table
        table = means(x, codes, table, weight)
        unused = torch.bincount(codes, minlength=entries) == 0
        count = min(int(unused.sum()), len(x))
        if count:
            worst = apart.sum(1).topk(count)
            where = unused.nonzero()[:count, 0][worst.values > 0]
            table[where] = x[worst.indices[worst.values > 0]]
    last = nearest(x, table, weight).long()
    cost = float(((x - table[last]).square() * (1 if weight is None else weight)).sum(dtype=torch.float64))
    return table if cost < least else best


def means(x: Tensor, codes: Tensor, table: Tensor, weight: Tensor | None = None) -> Tensor:
    """The weighted mean of the vectors of each code; unused entries are kept. x: [m, dim], codes: int64 [m]."""
    counts = torch.ones_like(x) if weight is None else weight
    total = torch.zeros(table.shape, dtype=torch.float64, device=x.device)
    mass = torch.zeros_like(total)
    total.index_add_(0, codes, (x * counts).double())
    mass.index_add_(0, codes, counts.double())
    return torch.where(mass > 0, total / mass, table.double()).to(table.dtype)


def _seed(x: Tensor, entries: int, weight: Tensor | None) -> Tensor:
    """k-means++ seeding: draws vectors one by one in proportion to their error under the entries so far."""
    step = math.ceil(len(x) / SEEDED)
    x = x[::step]
    weight = None if weight is None else weight[::step]
    seed = torch.Generator(device="cpu").manual_seed(0)
    draws = torch.rand(entries, generator=seed, dtype=torch.float64, device="cpu")
    middle = x.mean(0)
    first = ((x - middle).square() * (1 if weight is None else weight)).sum(1).argmin()
    table = x[first].repeat(entries, 1)
    cost = torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
    for i in range(1, entries):
        apart = (x - table[i - 1]).square() * (1 if weight is None else weight)
        cost = torch.minimum(cost, apart.sum(1))
        along = cost.cumsum(0, dtype=torch.float64)
        if not along[-1] > 0:
            break  # every vector has an entry of its own
        at = torch.searchsorted(along, (draws[i] * along[-1]).reshape(1)).clamp(max=len(x) - 1)
        table[i] = x[at[0]]
    return table


def stored(table: Tensor) -> Tensor:
    """The table in its stored dtype."""
    return table.clamp(-LIMIT, LIMIT).to(DTYPE).contiguous()
