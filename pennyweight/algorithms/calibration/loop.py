"""Runs calibration data through a model block by block; the inputs of a block are the outputs of the quantized blocks
before it."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed import all_reduce
from ...distributed.rank_group import RankGroup
from ...planning.config_resolution import PlanError
from ...planning.parameters import EXPERTS, FIRST_PROJECTIONS, kind_of
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
from .collect_statistics import BlockStatistics, CollectedStatistics, Collector, Pass
from .float32_products import run_batch
from .input_hooks import expert_modules
from .statistics import STATISTICS

HELD_OUT = 0.125  # fraction of the data that compares candidates of weights that are multiplied and looked up


Stage = tuple[list[str], BlockStatistics]


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
    With ``max_ram`` a block whose statistics exceed it runs several times on the same inputs, for some of its weights
    or experts each time.

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
        self.inputs, self.experts = _inputs(model, weights), expert_modules(model)

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
                    names, looked_up = segment.sites[0], segment.looked_up
                    passes: list[Pass] = [dict.fromkeys(self._of(names).values())]
                    yield names, BlockStatistics(passes, lambda _, n=names, up=looked_up: self._whole(n, up))

    def _whole(self, names: list[str], looked_up: bool) -> dict[str, CollectedStatistics]:
        """Statistics from running the whole model. No float inputs are available here, so paired ones are omitted."""
        collector = Collector(self._of(names), self.experts, self.single)
        if not looked_up:
            self._run(collector, self.batches)
            return collector.finish()
        first, rest = held_out(Batches(self.batches), HELD_OUT)
        self._run(collector, first)
        part = collector.finish(more=True)
        self._run(collector, rest)
        found = collector.finish()
        return {name: replace(part[name], looked_up=True, everything=found[name]) for name in part}

    def _run(self, collector: Collector, batches: Sequence[Any]) -> None:
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
                    found = self._block(names, segment, b, rest, hidden, exact)
                    yield names, found
                    found.close()
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
        self, names: list[str], segment: CalibrationSegment, b: int, rest: Rest, hidden: ActivationCache,
        exact: ActivationCache | None,
    ) -> BlockStatistics:  # fmt: skip
        own, block = self._of(names), segment.blocks[b][1]
        passes = self._passes(list(own.values()), segment)

        def advance() -> None:
            if exact is not None:
                advance_block(exact, range(len(self.batches)), b, block, rest)

        if not own:
            advance()
        return BlockStatistics(passes, partial(self._run_block, b, block, rest, hidden, exact, len(passes)), advance)

    def _run_block(
        self, b: int, block: nn.Module, rest: Rest, hidden: ActivationCache, exact: ActivationCache | None,
        passes: int, some: Pass,
    ) -> dict[str, CollectedStatistics]:  # fmt: skip
        """The statistics of a pass over the inputs of a block. The only pass also replaces the float model's inputs of
        the block by its outputs."""
        weights = {i: name for i, name in self.weights.items() if name in some}
        collector = Collector(weights, self.experts, self.single, self.paired, some)
        with step(f"collecting statistics of block {b}") as advance:
            for i, batch in enumerate(self.batches):
                mask = token_mask(batch)
                if exact is not None:
                    out = collector.record_float_inputs(lambda i=i: run_block(block, exact.get(i), rest(i, b)), mask)
                    if passes == 1:
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
        ``max_ram``. Raises PlanError if the statistics of one weight, or of one expert, exceed it."""
        if self.max_ram is None:
            return
        hidden = int(first.nbytes) * len(self.batches) * (2 if self.paired else 1)
        for names in segment.sites:
            needed = 0
            for name in names:
                need = self._needed(name, segment)
                needed += 0 if name in segment.repeated else need.pieces * need.each + need.shared
                least = need.each + need.shared
                if least > self.max_ram:
                    whose = "its inputs" if need.pieces == 1 else "the inputs of an expert"
                    raise PlanError(
                        f"{name}: the statistics of {whose} take {size(least)}, the memory limit leaves "
                        f"{size(self.max_ram)} for them; raise it (max_ram or max_memory), or use an algorithm with "
                        "smaller statistics, such as 'imatrix' or 'nearest'"
                    )
            if hidden + needed > self.max_ram:
                for store in stores:
                    if store is not None and store.folder is None:
                        store.folder = Path(folder)

    def _needed(self, name: str, segment: CalibrationSegment) -> _Needed:
        groups, width, first = self.inputs.get(name, _Inputs(1, 0, False))
        one_by_one = name in segment.experts
        kinds = self.single if one_by_one else (*self.single, *self.paired)
        with torch.device("meta"):
            each = sum(int(s.init(1 if one_by_one else groups, width)[0].nbytes) for s in kinds)
        return _Needed(groups if one_by_one else 1, max(1, each), each if one_by_one and first else 0)

    def _passes(self, names: list[str], segment: CalibrationSegment) -> list[Pass]:
        """The weights in their order, as many in each pass as the memory limit allows."""
        if self.max_ram is None or not names:
            return [dict.fromkeys(names)] if names else []
        passes: list[Pass] = [{}]
        room = self.max_ram
        for name in names:
            if name in segment.repeated and passes[-1]:  # shares the statistics of the weight before
                passes[-1][name] = None
                continue
            need, start = self._needed(name, segment), 0
            while start < need.pieces:
                some = int((room - need.shared) // need.each)
                if some < 1 and passes[-1]:
                    passes.append({})
                    room = self.max_ram
                    continue
                end = min(start + max(1, some), need.pieces)
                passes[-1][name] = range(start, end) if end - start < need.pieces else None
                room -= need.shared + need.each * (end - start)
                start = end
        return passes


def parse_bytes(text: str | float, name: str = "") -> int:
    """Bytes of a size such as "4 GB", or of a number. Raises PlanError, with the argument's name, for anything else."""
    try:
        return nbytes_of(text)
    except ValueError as error:
        prefix = f"{name}: " if name else ""
        raise PlanError(f'{prefix}a memory limit is a size such as "4 GB", or a number of bytes: {error}') from None


class _Inputs(NamedTuple):
    """Of a weight: how many groups of its rows have inputs of their own, and the width of these. first: it is the first
    projection of experts."""

    groups: int
    width: int
    first: bool


class _Needed(NamedTuple):
    """Bytes of the statistics of a weight, in pieces that can be collected one after another, and of those that all
    pieces need."""

    pieces: int
    each: int
    shared: int


def _inputs(model: nn.Module, weights: Mapping[int, str]) -> dict[str, _Inputs]:
    found: dict[str, _Inputs] = {}
    for module in model.modules():
        kind = kind_of(module)
        for param, p in module._parameters.items():
            name = weights.get(id(p))
            if name is None or p is None:
                continue
            if kind is not None and "convolution" in kind.op:
                across = p.shape[0] if "transposed" in kind.op else math.prod(p.shape[1:])
                found[name] = _Inputs(int(getattr(module, "groups", 1)), across, False)
            else:
                width = max(p.shape[-2:]) if kind is None else p.shape[-2 if kind.transposed else -1]
                found[name] = _Inputs(
                    p.shape[0] if p.ndim == 3 else 1, width, kind in EXPERTS and param in FIRST_PROJECTIONS
                )
    return found
