"""LSBQuantizer: sums of b binary terms +-v_i with small squared error (Pouransari, Tu, Tuzel 2020)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from ....optim.parq import nearest_value
from .quantizers import Quantizer

__all__ = ["LSBQuantizer", "binary_quant_residue", "binary_sign", "compute_v_per_channel"]


def binary_sign(input: Tensor) -> Tensor:
    """``torch.sign``, with 1 for 0."""
    return torch.where(input == 0, 1.0, input.sign())


def binary_quant_residue(u: Tensor, vs: Iterable[float | Tensor]) -> Tensor:
    """What is left of u after the terms v sign(rest), one after the other."""
    rest = u.detach().clone()
    for v in vs:
        rest -= v * binary_sign(rest)
    return rest


def compute_v_per_channel(p: Tensor, dim: int | None = None, ternary: bool = False) -> Tensor:
    """For each row of p [rows, n > 2] the v, among the magnitudes that satisfy an optimality condition, with the
    smallest |p - v sign(p) - v sign(rest)|; 0 if there is none. Returns [rows, 1]. ``dim`` must be -1.

    A magnitude |p|_(i) in ascending order satisfies the condition of ternary values if |p|_(i) <= m <= |p|_(i+1), with
    m half the mean of all above; for two bits also if the mean of the means above and below is between them.
    """
    if dim not in (-1, 1) or p.ndim != 2 or p.shape[1] < 3:
        raise ValueError(f"compute_v_per_channel needs a matrix with 3 columns or more and dim=-1, got {list(p.shape)}")
    ordered = p.abs().sort(dim=1).values
    sums = ordered.cumsum(1)
    total, sums = sums[:, -1:], sums[:, 1:-1]
    count = torch.arange(1, p.shape[1], device=p.device)
    above = (total - sums) / (count[:-1].flip(0) * 2)
    low, high = ordered[:, 1:-1], ordered[:, 2:]
    found = (low <= above) & (high >= above)
    if ternary:  # a row whose magnitudes are all nearly equal
        alone = p.mean(1, keepdim=True) / 2
        lies_below = alone < p.amin(1, keepdim=True)
        if lies_below.any():
            low = torch.cat((low, lies_below.to(p.dtype) * alone), 1)
            found = torch.cat((found, lies_below), 1)
    else:
        mean = sums / (count[1:] * 2) + above
        found |= (low <= mean) & (high >= mean)
    each = low[found].split(found.sum(1).tolist())
    candidates = torch.nn.utils.rnn.pad_sequence(each, batch_first=True) if found.any() else low.new_zeros(len(p), 1)
    v = candidates.unsqueeze(-1)
    rest = p.unsqueeze(1)
    for _ in range(2):
        rest = rest - v * binary_sign(rest)
    best = torch.linalg.vector_norm(rest, dim=-1).argmin(1, keepdim=True)
    return candidates.gather(1, best)


def _signs(b: int, like: Tensor) -> Tensor:
    """All 2^b rows of b signs, in ascending order."""
    return torch.tensor(list(itertools.product((-1, 1), repeat=b)), dtype=like.dtype, device=like.device)


class LSBQuantizer(Quantizer):
    """q = sum of b terms +-v_i, found greedily: v_i = mean |rest|. b = 0 is ternary: v = ternary_multiplier mean|p|.

    optimal: the least squares solution, for b = 1, 2 and ternary. Raises ValueError for more bits or b < 0.
    """

    def __init__(self, center: bool = False, optimal: bool = False, ternary_multiplier: float = 1.1) -> None:
        super().__init__(center)
        self.optimal, self.ternary_multiplier = optimal, ternary_multiplier

    def get_quant_size(self, b: int) -> int:
        """2^b, or 3 for b = 0."""
        return 2**b if b > 0 else 3

    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        if b < 0:
            raise ValueError(f"LSBQuantizer: b must not be negative, got {b}; 0 is ternary")
        if self.optimal and b > 2:
            raise NotImplementedError(f"LSBQuantizer(optimal=True) has solutions for 0, 1 and 2 bits, not {b}")
        x, mean = self._centered(p, dim)
        if self.optimal and b in (0, 2):
            q, values = (self.quantize_optimal_2bits if b else self.quantize_optimal_ternary)(x, dim)
        elif b == 0:
            q, values = self.quantize_simple_ternary(x, self.ternary_multiplier, dim)
        else:
            q, values = self.quantize_greedy(x, b, dim)
        return (q, values) if mean is None else (q + mean, values + mean)

    @staticmethod
    def quantize_greedy(p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """v_i = mean |rest|, one term after the other."""
        rest, vs = p.detach().clone(), []
        for _ in range(b):
            v = rest.abs().mean(dim=dim, keepdim=dim is not None)
            rest = rest - binary_sign(rest) * v
            vs.append(v)
        signs = _signs(b, p)
        values = torch.stack(vs) if dim is None else torch.cat(vs, 1)
        values = signs @ values if dim is None else values @ signs.T
        return p - rest, values.sort(-1).values

    @staticmethod
    def quantize_optimal_2bits(p: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Two terms with least squared error; with ``dim`` the first from :func:`compute_v_per_channel`."""
        signs = _signs(2, p)
        if dim is not None:
            first = compute_v_per_channel(p, dim)
            q = binary_sign(p) * first
            rest = p - q
            second = rest.abs().mean(1, keepdim=True)
            return q + binary_sign(rest) * second, torch.cat((first, second), -1) @ signs.T
        ordered, sums, count = _ordered(p)
        above = (sums[-1] - sums[:-1]) / count.flip(0)
        below = sums[:-1] / count
        first = (above + below) / 2
        fits = (above >= below) & (first >= ordered[:-1]) & (first < ordered[1:])
        pairs = list(zip(first[fits], ((above - below) / 2)[fits], strict=True))
        half = sums[-1] / len(ordered) / 2
        if half < ordered[0]:
            pairs.insert(0, (half, half))
        assert pairs, "LSBQuantizer: no solution for two bits; the weight contains NaN or has less than two elements"
        best = min(pairs, key=lambda pair: float(torch.linalg.vector_norm(binary_quant_residue(p, pair))))
        return p - binary_quant_residue(p, best), signs @ torch.stack(best)

    @staticmethod
    def quantize_optimal_ternary(p: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Values -v, 0, v of the tensor; with ``dim`` -2v, 0, 2v of each row."""
        if dim is not None:
            v = compute_v_per_channel(p, dim, ternary=True)
            sign = binary_sign(p)
            q = (sign + binary_sign(p - sign * v)) * v
            return q, torch.cat((-2 * v, torch.zeros_like(v), 2 * v), -1)
        ordered, sums, count = _ordered(p)
        half = (sums[-1] - sums[:-1]) / count.flip(0) / 2
        fits = [*half[(half >= ordered[:-1]) & (half < ordered[1:])]]
        whole = sums[-1] / len(ordered) / 2
        if whole < ordered[0]:
            fits.insert(0, whole)
        assert fits, "LSBQuantizer: no ternary solution; the weight contains NaN or has less than two elements"
        unit = torch.tensor([-1, 0, 1], dtype=p.dtype, device=p.device)
        rounded = [nearest_value(p, v * unit) for v in fits]
        at = min(range(len(fits)), key=lambda i: float(torch.linalg.vector_norm(p - rounded[i])))
        return rounded[at], fits[at] * unit

    @staticmethod
    def quantize_simple_ternary(p: Tensor, multiplier: float, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Values -v, 0, v with v = multiplier mean|p|."""
        v = multiplier * p.abs().mean(dim=dim, keepdim=dim is not None)
        values = v * torch.tensor([-1.0, 0.0, 1.0], dtype=p.dtype, device=p.device)
        return nearest_value(p, values), values


def _ordered(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending magnitudes, their cumulative sums, and 1 .. n - 1."""
    ordered = p.abs().flatten().sort().values
    return ordered, ordered.cumsum(0), torch.arange(1, len(ordered), device=p.device)
