"""The shares of ranks: everything once, the same on each rank."""

from hypothesis import given
from hypothesis import strategies as st

from pennyweight.algorithms.calibration.loop import SharedWork

NAMES = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=10)


@given(NAMES, st.dictionaries(st.sampled_from("abcdefghij"), st.floats(0, 1e9)), st.integers(1, 5), st.booleans())
def test_each_weight_has_one_rank(names: list[str], cost: dict[str, float], size: int, table: bool) -> None:
    together = frozenset(names[:1]) if table else frozenset[str]()
    shares = [SharedWork(rank, size, cost, together).weights(names) for rank in range(size)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    for share in shares:
        assert share == [name for name in names if name in share]  # in their order
    if table and names:
        assert shares[0] == names
    loads = [sum(cost.get(name, 0.0) for name in share) for share in shares]
    if names and not table:
        assert max(loads) <= sum(loads) / size + max(cost.get(name, 0.0) for name in names)


@given(st.integers(0, 40), st.integers(1, 5))
def test_each_batch_has_one_rank(count: int, size: int) -> None:
    shares = [SharedWork(rank, size).batches(count) for rank in range(size)]
    assert sorted(i for share in shares for i in share) == list(range(count))
