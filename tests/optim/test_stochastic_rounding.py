"""Stochastic rounding: unbiased, a function of its key, the same wherever it is computed."""

import math

import torch

from pennyweight.core import stochastic_rounding
from pennyweight.core.formats import UFLOAT8
from pennyweight.optim import AdamW8bit
from pennyweight.optim.quantized_states import KEPT, write_, zeros

N = 1 << 20


def test_words_are_uniform_and_bits_are_independent() -> None:
    """Each bit, each pair of neighbouring elements' bits, and each pair of keys: within 5 sigma of a half."""
    w = stochastic_rounding.random_bits((N,), stochastic_rounding.make_key(1, 2, 3))
    other = stochastic_rounding.random_bits((N,), stochastic_rounding.make_key(1, 2, 4))
    near = 5 * 0.5 / math.sqrt(N)
    for bit in range(32):
        b = (w >> bit & 1).double()
        assert abs(b.mean() - 0.5) < near
        assert abs((b[1:] * b[:-1]).mean() - 0.25) < near
        assert abs((b * (other >> bit & 1)).mean() - 0.25) < near
    assert w.unique().numel() > N * (1 - 2 * N / 2**32)
    chi = torch.bincount((w & 0xFFFF) >> 8, minlength=256).double()
    assert ((chi - N / 256) ** 2 / (N / 256)).sum() < 255 + 5 * math.sqrt(2 * 255)


def test_bfloat16_is_unbiased() -> None:
    """The mean over many is the number, within 5 sigma; both neighbours occur and nothing else."""
    for value in (1.0 + 2**-9, -3.14159, 1e-3, 2.0**-130 * 1.3, 65280.0 + 77):
        x = torch.full((N,), value)
        y = stochastic_rounding.round_to_bfloat16(
            x,
            stochastic_rounding.low_bits(
                stochastic_rounding.random_bits(x.shape, stochastic_rounding.make_key(7)),
                stochastic_rounding.step_mask(3),
            ),
        ).double()
        exact, low, high = x[0].double(), y.min(), y.max()
        assert low < exact < high
        assert y.unique().numel() == 2
        sigma = (high - low) * 0.5 / math.sqrt(N)
        assert abs(y.mean() - exact) < 5 * sigma
    kept = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan])
    got = stochastic_rounding.round_to_bfloat16(
        kept,
        stochastic_rounding.low_bits(stochastic_rounding.random_bits(kept.shape, stochastic_rounding.make_key(0)), 0),
    )
    torch.testing.assert_close(got, kept.bfloat16(), equal_nan=True, rtol=0, atol=0)


def test_second_moments_are_unbiased() -> None:
    """Their mean over many steps is the number, within two of its neighbours' distances over the number of steps; so
    is the mean over all elements of a step, within 5 sigma."""
    x = torch.rand(4, 256) ** 4
    x[:, 0] = 1.0
    state = zeros(x.shape, KEPT["8bit"]["squares"], 256, x.device)
    fits = x > 4 * UFLOAT8.lo / UFLOAT8.hi
    rounds, total = 400, torch.zeros(x.shape, dtype=torch.float64)
    for i in range(rounds):
        write_(state, x, KEPT["8bit"]["squares"], stochastic_rounding.make_key(5), stochastic_rounding.step_mask(i))
        y = state.dequantize().double()
        assert abs((y / x - 1)[fits].mean()) < 5 * 0.5 * 0.125 / math.sqrt(int(fits.sum()))
        total += y
    gap = x / 8  # at most
    assert bool(((total / rounds - x).abs() < 2 * gap / rounds)[fits].all())


def test_bf16_parameters_move_by_less_than_their_last_place() -> None:
    """Updates of a tenth of a step vanish when rounded to nearest; rounded stochastically they add up."""
    moved = {}
    for by_chance in (False, True):
        p = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], lr=2.0**-8 / 10, weight_decay=0, bf16_stochastic_round=by_chance)
        for _ in range(20):
            p.grad = torch.full_like(p, 1e-2)
            optimizer.step()
        moved[by_chance] = float(1 - p.detach().float().mean())
    assert moved[False] == 0
    assert abs(moved[True] - 20 * 2.0**-8 / 10) < 0.02 * 20 * 2.0**-8 / 10


def test_the_seed_and_nothing_else_decides() -> None:
    def run(seed: int) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        optimizer = AdamW8bit([p], lr=1e-3, bf16_stochastic_round=True, seed=seed)
        torch.rand(3)
        p.grad = torch.full_like(p, 1e-2)
        optimizer.step()
        return p.detach()

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
