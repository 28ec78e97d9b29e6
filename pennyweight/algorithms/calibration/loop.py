"""Runs calibration data through a model block by block; the inputs of a block are the outputs of the quantized blocks
before it."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed import all_reduce
from ...distributed.rank_group import RankGroup
from ...planning.config_resolution import PlanError
from ...planning.plan import PlanRow
from ...planning.quantize_report import nbytes_of, size
from ...planning.run_batch import token_mask
from ...support.progress import step
from .activation_cache import (
    SHARED_STATES,
    STATES,
    ActivationCache,
    Rest,
    advance_block,
    capture_block_inputs,
    run_block,
)
from .batches import Batches, held_out
from .block_order import CalibrationSegment, calibration_segments, inference_mode
from .float32_products import run_batch
from .input_hooks import InputHooks, require_finite
from .statistics import STATISTICS, State, Statistic

HELD_OUT = 0.125  # fraction of the data that compares candidates of weights that are multiplied and looked up


@dataclass
class CollectedStatistics:
    """Finished statistics of one weight's inputs: by name [G, K, K] or [G, K]; and the number of tokens per group.

    looked_up   the model also looks up rows of the weight; then the statistics are without the batches, or rows of a
                single batch, that :func:`.batches.held_out` sets aside for :data:`HELD_OUT`
    everything  then those of all data
    """

    stats: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    looked_up: bool = False
    everything: CollectedStatistics | None = None


Stage = tuple[list[str], dict[str, CollectedStatistics]]


@dataclass(frozen=True)
class SharedWork:
    """How ranks that all have the same data share a calibration: each collects and solves some weights of a block, and
    computes the hidden states of some batches. Results do not depend on the number of ranks. The default is one process
    that does everything.

    cost      of solving a weight, by name: the largest go first, each to the rank that has least to do
    together  names of weights whose solution depends on the order in a block; one rank solves all of that block
    wait      returns when every rank has called it, and raises if one has failed
    """

    rank: int = 0
    size: int = 1
    cost: Mapping[str, float] = field(default_factory=dict)
    together: Set[str] = frozenset()
    wait: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, team: RankGroup, rows: Sequence[PlanRow]) -> SharedWork:
        """That of planned weights. A solve costs rows times columns squared; a table that is looked up too is compared
        with the model as it is then."""
        cost = {row.name: float(math.prod(row.shape)) * max(row.shape) for row in rows}
        tables = frozenset(row.name for row in rows if "embedding" in row.ops and len(row.ops) > 1)
        return cls(team.rank, team.size, cost, tables, lambda: team.step(lambda: None))

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


class CalibrationLoop:
    """Runs batches through a model and yields the input statistics of one set of weights after another.

    After each set the caller replaces those weights, so the next set sees the inputs of the quantized model. Memory:
    hidden states of all batches between two blocks (on disk with ``spill``), the statistics of one block, the model.

    weights     id of a parameter -> its name
    needs       names of statistics
    spill       folder for hidden states between blocks; None keeps them in memory
    known       weights that are already solved: nothing is collected for sets of only these
    max_ram     memory limit in bytes for hidden states plus a block's statistics; hidden states go to a temporary
                folder if they do not fit
    share       the part of the work of this rank, if all ranks have the same data. More than one need ``spill``, a
                folder that all can read
    """

    def __init__(
        self, model: nn.Module, weights: dict[int, str], batches: Sequence[Any], needs: Sequence[str],
        spill: str | Path | None = None, known: frozenset[str] = frozenset(), max_ram: float | None = None,
        share: SharedWork | None = None,
    ) -> None:  # fmt: skip
        self.share = share or SharedWork()
        self.model, self.weights, self.batches = model, weights, batches
        self.single = [STATISTICS[n] for n in needs if not STATISTICS[n].paired]
        self.paired = [STATISTICS[n] for n in needs if STATISTICS[n].paired]
        self.spill, self.known, self.max_ram = spill, known, max_ram

    def stages(self) -> Iterator[Stage]:
        """(names, statistics) in the model's call order. Deterministic."""
        with inference_mode(self.model):
            found = calibration_segments(self.model, self.weights, self.batches[0])
            if all_reduce.is_distributed():
                all_reduce.require_same("which weights they use, and in which order", [s.sites for s in found])
            for segment in found:
                if segment.blocks:
                    yield from self._chain(segment)
                else:
                    yield segment.sites[0], self._whole(segment.sites[0], segment.looked_up)

    def _whole(self, names: list[str], looked_up: bool) -> dict[str, CollectedStatistics]:
        """Statistics from running the whole model. No float inputs are available here, so paired ones are omitted."""
        collector = _Collector(self._of(names), self.single)
        if not looked_up:
            self._run(collector, self.batches)
            return collector.finish()
        first, rest = held_out(Batches(self.batches), HELD_OUT)
        self._run(collector, first)
        part = collector.finish(more=True)
        self._run(collector, rest)
        found = collector.finish()
        return {name: replace(part[name], looked_up=True, everything=found[name]) for name in part}

    def _run(self, collector: _Collector, batches: Sequence[Any]) -> None:
        if not collector.weights:
            return
        with step("collecting statistics") as advance:
            for i, batch in enumerate(batches, 1):
                collector.run(lambda batch=batch: run_batch(self.model, batch), token_mask(batch))
                advance(i, len(batches), "")

    def _chain(self, segment: CalibrationSegment) -> Iterator[Stage]:
        several, count = self.share.size > 1, range(len(self.batches))
        with tempfile.TemporaryDirectory(dir=self.spill, prefix=STATES) as folder:
            place = None if self.spill is None else Path(folder)
            own = self.share.batches(len(self.batches))
            hidden = ActivationCache(
                self._shared_folder(segment) if several else place, "quantized", own if several else None
            )
            exact = ActivationCache(place, "float") if self.paired else None
            rest = capture_block_inputs(
                self.model, self.batches, [block for _, block in segment.blocks], hidden,
                lambda first: self._limit(segment, first, (hidden, exact), folder),
            )  # fmt: skip
            self.share.wait()
            if exact is not None:
                for i in count:
                    exact.put(i, hidden.get(i))
            for b, ((_, block), names) in enumerate(zip(segment.blocks, segment.sites, strict=True)):
                if b > segment.last:
                    break
                if names:
                    yield names, self._block(names, b, block, rest, hidden, exact)
                elif exact is not None:
                    advance_block(exact, count, b, block, rest)
                if b < segment.last:
                    self.share.wait()  # until no rank reads the states that are replaced
                    advance_block(hidden, own, b, block, rest)
                    self.share.wait()
            if several and self.share.rank == 0 and hidden.folder is not None:  # the last block has been collected
                shutil.rmtree(hidden.folder)

    def _shared_folder(self, segment: CalibrationSegment) -> Path:
        """For hidden states that ranks read from each other."""
        assert self.spill is not None
        folder = Path(self.spill) / f"{SHARED_STATES}{segment.blocks[0][0]}"
        folder.mkdir(exist_ok=True)
        return folder

    def _block(
        self,
        names: list[str],
        b: int,
        block: nn.Module,
        rest: Rest,
        hidden: ActivationCache,
        exact: ActivationCache | None,
    ) -> dict[str, CollectedStatistics]:
        collector = _Collector(self._of(names), self.single, self.paired)
        if not collector.weights:
            if exact is not None:
                advance_block(exact, range(len(self.batches)), b, block, rest)
            return collector.finish()
        with step(f"collecting statistics of block {b}") as advance:
            for i, batch in enumerate(self.batches):
                mask = token_mask(batch)
                if exact is not None:
                    out = collector.record_float_inputs(lambda i=i: run_block(block, exact.get(i), rest(i, b)), mask)
                    exact.put(i, out)
                collector.run(lambda i=i: run_block(block, hidden.get(i), rest(i, b)), mask)
                advance(i + 1, len(self.batches), "")
        return collector.finish()

    def _of(self, names: list[str]) -> dict[int, str]:
        """The weights of these names whose statistics this rank collects."""
        wanted = set(self.share.weights([name for name in names if name not in self.known]))
        return {i: name for i, name in self.weights.items() if name in wanted}

    def _limit(
        self, segment: CalibrationSegment, first: Tensor, stores: tuple[ActivationCache | None, ...], folder: str
    ) -> None:
        """Called with the first hidden states: store all hidden states on disk if they and a block's statistics exceed
        ``max_ram``. Raises PlanError if the statistics alone exceed it."""
        if self.max_ram is None:
            return
        hidden = int(first.nbytes) * len(self.batches) * (2 if self.paired else 1)
        ids = {name: i for i, name in self.weights.items()}
        parameters = {id(p): p for p in self.model.parameters()}
        for (name, _), names in zip(segment.blocks, segment.sites, strict=True):
            shapes = [parameters[ids[n]].shape for n in names if ids[n] in parameters and n not in segment.repeated]
            # The contracted axis is the last except in transposed linears; the larger of both is an upper bound
            widths = [(s[0] if len(s) == 3 else 1, max(s[1:]) if len(s) != 4 else s[1:].numel()) for s in shapes]
            with torch.device("meta"):
                states = [s.init(*width)[0] for width in widths for s in (*self.single, *self.paired)]
            needed = sum(int(state.nbytes) for state in states)
            if needed > self.max_ram:
                raise PlanError(
                    f"{name}: the statistics of its inputs take {size(needed)}, the memory limit leaves "
                    f"{size(self.max_ram)} for them; raise it (max_ram or max_memory), or use an algorithm with "
                    "smaller statistics, such as 'imatrix' or 'nearest'"
                )
            if hidden + needed > self.max_ram:
                for store in stores:
                    if store is not None and store.folder is None:
                        store.folder = Path(folder)


def parse_bytes(text: str | float, name: str = "") -> int:
    """Bytes of a size such as "4 GB", or of a number. Raises PlanError, with the argument's name, for anything else."""
    try:
        return nbytes_of(text)
    except ValueError as error:
        prefix = f"{name}: " if name else ""
        raise PlanError(f'{prefix}a memory limit is a size such as "4 GB", or a number of bytes: {error}') from None


@dataclass
class _SameInputs:
    """Weights that have got the same inputs so far, and the states of their statistics."""

    names: set[str]
    states: dict[str, State] = field(default_factory=dict)

    def take(self, names: set[str]) -> _SameInputs:
        """Separate ``names`` from the others, with states of their own."""
        self.names -= names
        return _SameInputs(names, {s: (total.clone(), count) for s, (total, count) in self.states.items()})


class _Inputs(NamedTuple):
    """Inputs that one weight after another got, and those of the float model. Copies, because a model may write into
    them before the next weight reads them."""

    names: list[str]
    x: Tensor
    x_float: Tensor | None

    def equal(self, x: Tensor, x_float: Tensor | None) -> bool:
        if not torch.equal(self.x, x) or (x_float is None) != (self.x_float is None):
            return False
        return x_float is None or self.x_float is x_float or torch.equal(self.x_float, x_float)  # type: ignore[arg-type]


class _Collector:
    """Collects the statistics of some weights during forward passes. Weights with the same inputs, such as those of
    queries, keys and values, share them: one Hessian instead of three."""

    def __init__(self, weights: dict[int, str], single: Sequence[Statistic], paired: Sequence[Statistic] = ()) -> None:
        self.weights, self.single, self.paired = weights, single, paired
        self.groups: list[_SameInputs] = []
        self.tokens = dict.fromkeys(weights.values(), 0)
        self.float_inputs: dict[str, list[Tensor]] = {}
        self.waiting: _Inputs | None = None  # the statistics do not have them yet

    def record_float_inputs(self, run: Callable[[], Any], mask: Tensor | None) -> Any:
        """Run one batch on the float inputs and keep the layer inputs for paired statistics. Returns the output."""
        self.float_inputs = {}
        before: Tensor | None = None

        def see(name: str, x: Tensor) -> None:
            nonlocal before
            before = before if before is not None and torch.equal(x, before) else x.clone()
            self.float_inputs.setdefault(name, []).append(before)

        with InputHooks(self.weights, see, mask):
            return run()

    def run(self, run: Callable[[], Any], mask: Tensor | None) -> None:
        with InputHooks(self.weights, self._see, mask):
            run()
        self._add()

    def _see(self, name: str, x: Tensor) -> None:
        if not x.shape[1]:
            return
        x_float = None
        if self.paired:
            queue = self.float_inputs.get(name)
            x_float = queue.pop(0) if queue else None
            if x_float is not None and x_float.shape != x.shape:
                x_float = None  # routed differently in the float model: paired statistics use tokens that both have
        last = self.waiting
        if last is not None and name not in last.names and last.equal(x, x_float):
            last.names.append(name)
        else:
            require_finite(name, x)
            self._add()
            self.waiting = _Inputs([name], x.clone(), x_float)
        self.tokens[name] += x.shape[1]

    def _add(self) -> None:
        """Add the waiting inputs to the statistics of their weights."""
        got, self.waiting = self.waiting, None
        if got is None:
            return
        names = set(got.names)
        for group in list(self.groups):
            shared = group.names & names
            if shared and shared != group.names:
                self.groups.append(group.take(shared))
        first = names.difference(*(group.names for group in self.groups))
        if first:
            self.groups.append(_SameInputs(first))
        pair = () if got.x_float is None else (got.x_float,)
        for group in self.groups:
            if group.names <= names:
                for statistic in (*self.single, *(self.paired if pair else ())):
                    self._update(group.states, statistic, got.x, *(pair if statistic.paired else ()))

    def _update(self, states: dict[str, State], statistic: Statistic, *x: Tensor) -> None:
        state = states.get(statistic.name)
        if state is None:
            total, count = statistic.init(x[0].shape[0], x[0].shape[2])
            state = total.to(x[0].device), count
        states[statistic.name] = statistic.update(state, *x)

    def finish(self, more: bool = False) -> dict[str, CollectedStatistics]:
        """The statistics of what was run, of all ranks. more: further batches will be added."""
        tokens = dict(self.tokens)
        groups = [_SameInputs(set(group.names), dict(group.states)) for group in self.groups]
        if not more:
            self.groups = []
        if all_reduce.is_distributed():
            tokens, groups = self._of_all_ranks(tokens, groups)
        found = {name: CollectedStatistics({}, n) for name, n in tokens.items()}
        for group in groups:
            for statistic in list(group.states):
                value = STATISTICS[statistic].finish(group.states.pop(statistic))
                for name in group.names:
                    found[name].stats[statistic] = value
        return found

    def _of_all_ranks(
        self, tokens: dict[str, int], groups: list[_SameInputs]
    ) -> tuple[dict[str, int], list[_SameInputs]]:
        """Merged, one statistic of one group at a time. Every rank merges in the order of the weights."""
        tokens = {name: sum(all_reduce.gather_objects(tokens[name])) for name in self.weights.values()}
        order = {name: i for i, name in enumerate(self.weights.values())}
        which = sorted(sorted(group.names, key=order.__getitem__) for group in groups)
        if any(other != which for other in all_reduce.gather_objects(which)):  # routed differently: each on its own
            groups = [_SameInputs({name}, dict(g.states)) for g in groups for name in g.names]
            groups += [_SameInputs({name}) for name in order.keys() - {n for g in groups for n in g.names}]
        groups = sorted(groups, key=lambda group: min(map(order.__getitem__, group.names)))
        for group in groups:
            for statistic in (*self.single, *self.paired):
                state = all_reduce.merge_states(statistic, group.states.pop(statistic.name, None))
                if state is not None:
                    group.states[statistic.name] = state
        return tokens, groups
