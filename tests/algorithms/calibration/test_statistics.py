"""Statistics: update, merge and finish against formulas, in any order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pennyweight.algorithms import STATISTICS, Statistic, register_statistic
from pennyweight.algorithms.calibration.statistics import BINS, Bins, State, bins, collect

G, K = 2, 5
FORMULAS: dict[str, Callable[..., Tensor]] = {
    "hessian": lambda x: torch.einsum("gti,gtj->gij", x, x) / x.shape[1],
    "drift": lambda x, twin: torch.einsum("gti,gtj->gij", twin - x, x) / x.shape[1],
    "second_moment": lambda x: x.square().mean(1),
    "absmean": lambda x: x.abs().mean(1),
    "absmax": lambda x: x.abs().amax(1),
    "minmax": lambda x: torch.stack([x.amin(1), x.amax(1)], 1),
}


def batches(seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(G, n, K, generator=g) * 3**i for i, n in enumerate((7, 1, 0, 20))]


def run(it: Statistic, xs: list[Tensor]) -> State:
    state = it.init(G, K)
    for x in xs:
        state = it.update(state, x, x.roll(1, 2)) if it.paired else it.update(state, x)
    return state


def test_every_statistic_has_a_formula_here() -> None:
    assert {*FORMULAS, "histogram"} == STATISTICS.keys()


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_order_and_merge(name: str) -> None:
    it, xs = STATISTICS[name], batches()
    x = torch.cat(xs, 1).double()
    direct = FORMULAS[name](x, x.roll(1, 2)) if it.paired else FORMULAS[name](x)
    whole = run(it, xs)
    assert whole[1] == x.shape[1]
    torch.testing.assert_close(it.finish(whole).double(), direct, rtol=1e-5, atol=1e-5)
    merged = it.merge(run(it, xs[2:]), run(it, xs[:2]))
    assert merged[1] == whole[1]
    for other in (merged, run(it, xs[::-1])):
        torch.testing.assert_close(it.finish(other), it.finish(whole), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_no_tokens_change_nothing(name: str) -> None:
    it, x = STATISTICS[name], batches()[0]
    none = torch.zeros(G, 0, K)
    before, after = run(it, [x]), run(it, [none, x, none])
    assert before[1] == after[1]
    assert torch.equal(it.finish(before), it.finish(after))
    assert torch.equal(it.finish(it.merge(it.init(G, K), before)), it.finish(before))


def test_collect_by_hand() -> None:
    xs = [torch.randn(2, 3, K), torch.randn(4, K)]
    flat = torch.cat([x.reshape(-1, K) for x in xs])
    torch.testing.assert_close(collect("second_moment", xs), flat.square().mean(0))
    with pytest.raises(ValueError, match="no batches"):
        collect("absmax", [])


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'hessian' is already registered"):
        register_statistic(STATISTICS["hessian"])


# -- the histogram -----------------------------------------------------------------------------------------------------

HISTOGRAM = STATISTICS["histogram"]


def test_bins_are_the_same_in_any_order_however_ranges_grow() -> None:
    g = torch.Generator().manual_seed(0)
    xs = [torch.randn(1, 50, 3, generator=g) * s for s in (1e-6, 1.0, 3e4, 1e-3, 0.0)]
    whole = HISTOGRAM.finish(run_one(xs))
    for other in (xs[::-1], [torch.cat(xs, 1)]):
        assert torch.equal(HISTOGRAM.finish(run_one(other)), whole)
    halves = HISTOGRAM.merge(run_one(xs[:2]), run_one(xs[2:]))
    assert torch.equal(HISTOGRAM.finish(halves), whole)
    assert torch.equal(HISTOGRAM.finish(HISTOGRAM.merge(run_one(xs[2:]), run_one(xs[:2]))), whole)


def run_one(xs: list[Tensor]) -> State:
    state = HISTOGRAM.init(1, 3)
    for x in xs:
        state = HISTOGRAM.update(state, x)
    return state


def test_bins_hold_what_was_seen() -> None:
    x = torch.cat([torch.randn(1, 4000, 1), torch.tensor([[[-8.0], [4.0], [0.0]]])], 1)
    b: Bins = bins(HISTOGRAM.finish(run_one([x])))
    values = x.flatten().double()
    assert (b.least, b.greatest) == (-8.0, float(values.max()))
    assert b.width == 16 / (BINS // 2)  # -8 is not inside of (-8, 8)
    assert b.counts.sum() == values.numel()
    assert b.counts[0] > 0
    assert b.counts[-1] > 0
    for middle, count in zip(b.middles[::97], b.counts[::97], strict=True):
        inside = (values >= middle - b.width / 2) & (values < middle + b.width / 2)
        assert int(inside.sum()) == count


def test_bins_of_groups_are_added_up() -> None:
    x = torch.stack([torch.randn(40, 3), 1000 * torch.randn(40, 3)])
    apart = bins(HISTOGRAM.finish(HISTOGRAM.update(HISTOGRAM.init(2, 3), x)))
    together = bins(HISTOGRAM.finish(run_one([x.flatten(0, 1).unsqueeze(0)])))
    assert (apart.least, apart.greatest, apart.width) == (together.least, together.greatest, together.width)
    assert torch.equal(apart.counts, together.counts)


@pytest.mark.parametrize("value", [0.0, 1e-45, -3e-39, 3e38])
def test_bins_of_one_value(value: float) -> None:
    b = bins(HISTOGRAM.finish(run_one([torch.full((1, 6, 1), value)])))
    assert (b.least, b.greatest, float(b.counts.sum())) == (torch.tensor(value).double().item(),) * 2 + (6.0,)
    assert abs(float(b.middles[0]) - b.least) <= b.width / 2


def test_bins_of_nothing() -> None:
    with pytest.raises(ValueError, match="the histogram is empty"):
        bins(HISTOGRAM.finish(HISTOGRAM.init(1, 3)))
