"""How ranks that all have the same data share a calibration: each collects and solves some weights of a block, and
computes the hidden states of some batches. Results do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SharedWork:
    """The share of one rank. The default is one process that does everything.

    cost      of solving a weight, by name: the largest go first, each to the rank that has least to do
    together  names of weights whose solution depends on the order in a block; one rank solves all of that block
    wait      returns when every rank has called it, and raises if one has failed
    """

    rank: int = 0
    size: int = 1
    cost: Mapping[str, float] = field(default_factory=dict)
    together: Set[str] = frozenset()
    wait: Callable[[], object] = lambda: None

    def batches(self, count: int) -> range:
        """Indices of the batches whose hidden states this rank computes."""
        return range(self.rank, count, self.size)

    def weights(self, names: Sequence[str]) -> list[str]:
        """The names that this rank solves, in their order."""
        if self.size == 1:
            return list(names)
        if self.together.intersection(names):
            return list(names) if self.rank == 0 else []
        load, mine = [0.0] * self.size, set()
        for name in sorted(names, key=lambda n: (-self.cost.get(n, 0.0), n)):
            rank = min(range(self.size), key=load.__getitem__)
            load[rank] += self.cost.get(name, 0.0)
            if rank == self.rank:
                mine.add(name)
        return [name for name in names if name in mine]
