"""What a calibration will take: seconds, memory and disk, from a measurement of seconds before it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...planning.config_resolution import PlanError
from ...planning.parameters import FIRST_PROJECTIONS
from ...planning.plan import Plan, PlanRow
from ...planning.quantize_report import duration, size
from ...planning.run_batch import token_mask
from ...planning.scheme import Scheme
from ..base import Solver
from ..recipe import Recipe
from ..solve import solve_weight
from ..solvers.block_search import CHUNK
from ..solvers.gptq import FLOAT64_INPUTS
from ..tied_weights import RATIO_BATCHES
from .activation_cache import ActivationCache, capture_block_inputs
from .block_order import CalibrationSegment, calibration_segments, inference_mode
from .collect_statistics import CollectedStatistics
from .input_hooks import Expert, InputHooks
from .loop import HELD_OUT
from .statistics import STATISTICS, State

SECONDS = 20.0  # for trial solutions
ROWS = 256  # of the random inputs whose statistics a trial solution gets
CODES = 3  # bytes of an element that is solved: of its own matrix, of all, and packed
PROCESSES = (2, 4)  # a report gives the time of as many, too


@dataclass(frozen=True)
class CalibrationCost:
    """Seconds of one process, and bytes.

    inputs       running the model for the statistics; every rank of a shared calibration does it
    outputs      running finished blocks for the inputs of the next ones; ranks share it, and the next two
    statistics   sums over the inputs
    solving      the solver
    statistics_bytes   of the block whose inputs have the largest ones
    hidden_bytes       hidden states of all batches between two blocks
    untimed      steps of the recipe whose time is not in these
    """

    tokens: int
    inputs: float
    outputs: float
    statistics: float
    solving: float
    statistics_bytes: int
    hidden_bytes: int
    untimed: tuple[str, ...] = ()

    def seconds(self, processes: int = 1) -> float:
        """In all, on so many equal machines that share the weights of each block."""
        return self.inputs + (self.outputs + self.statistics + self.solving) / processes

    def notes(self, *, largest: int, finished: int | None) -> list[str]:
        """Two lines for a report.

        largest    bytes of the largest weight while it is solved
        finished   bytes of all solved weights, if they and hidden states are in files, and processes share the work
        """
        parts = {
            "running the model": self.inputs + self.outputs,
            "statistics": self.statistics,
            "solving": self.solving,
        }
        text = f"calibration with {self.tokens:,} tokens: about {duration(self.seconds())} ("
        text += ", ".join(f"{name} {duration(t)}" for name, t in parts.items()) + ")"
        if finished is not None:
            text += "".join(f"; {n} processes {duration(self.seconds(n))}" for n in PROCESSES)
        if self.untimed:
            text += f"; without the time of {' and '.join(self.untimed)}"
        states, need = f"{size(self.hidden_bytes)} of hidden states", self.statistics_bytes + largest
        if finished is None:
            memory = f"memory beside the model: about {size(need + self.hidden_bytes)}, with {states}"
        else:
            memory = f"memory: about {size(need)} beside mapped files; disk until the end: {states}, "
            memory += f"{size(finished)} of weights"
        return [text, memory]


def solving_bytes(todo: Plan, solver: Solver) -> int:
    """Bytes that a planned weight takes at most while it is solved: the weight in float32 and its codes, copies of the
    rows that are solved at once, and what factoring a Hessian takes. Of experts one matrix and the codes of all."""

    def needed(row: PlanRow) -> int:
        assert row.scheme is not None
        shape = row.shape
        if row.site is not None and row.site.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if _by_expert(row):
            return CODES * math.prod(shape) + matrix(shape[1:], row.scheme)
        return matrix(shape, row.scheme)

    def matrix(shape: Sequence[int], scheme: Scheme) -> int:
        elements, width = math.prod(shape), math.prod(shape[1:]) if len(shape) > 3 else shape[-1]
        in_chunks = len(shape) == 2 and scheme.weight.rows_independent(shape)
        of_rows = 4 * solver.copies * (min(elements, max(CHUNK, width)) if in_chunks else elements)
        # the factor while it is computed, and in float32
        factor = (12 if width <= FLOAT64_INPUTS else 8) * width**2 if "hessian" in solver.needs else 0
        return 7 * elements + of_rows + factor

    return max((needed(row) for row in todo.active if len(row.shape) > 1), default=0)


def _by_expert(row: PlanRow) -> bool:
    """Whether the matrices of a weight [experts, out, in] are solved one by one."""
    experts = row.site is not None and row.site.op == "bmm" and len(row.shape) == 3
    return experts and row.scheme is not None and row.scheme.weight.rows_independent(row.shape)


def room_beside(todo: Plan, solver: Solver, max_memory: float, more: int = 0) -> float:
    """Bytes that the planned weight which takes most leaves of a limit while it is solved. more: bytes that it takes
    besides. Raises PlanError if there are none."""
    needed = solving_bytes(todo, solver) + more
    if needed >= max_memory:
        raise PlanError(
            f"max_memory is {size(int(max_memory))}, but while the largest weight is solved it takes up to "
            f"{size(needed)}; raise max_memory, or skip that layer"
        )
    return max_memory - needed


def estimate_cost(
    model: nn.Module, todo: Plan, recipe: Recipe, batches: Sequence[Any], optional: bool = True,
    room: float | None = None,
) -> CalibrationCost:  # fmt: skip
    """Measure one run of the model on the first batch, one update of each statistic of each shape, and trial solutions
    of random weights, the smallest shapes first, for SECONDS; larger shapes are taken in proportion to the operations.

    Changes nothing, torch's random state included. Time and memory of rewrites and tuners are not estimated. A weight
    with several rows in the plan is solved for each of them. optional: as for :func:`~..solve.stages`. room: bytes for
    the statistics of a block, which takes several runs of it if they exceed that.
    """
    weights = {row.name: row for row in todo.active if row.call is None and row.tensor is not None}
    ids = {id(row.tensor): name for name, row in weights.items()}
    batch, solver = batches[0], recipe.solver
    several = sum(map(extent, batches)) / max(1, extent(batch))  # all batches, in units of the first
    inputs = _Inputs({}, {}, {})
    with inference_mode(model):
        begin = time.perf_counter()
        with InputHooks(ids, inputs.see, token_mask(batch), see_expert=inputs.see_expert):
            segments = calibration_segments(model, ids, batch)
        once = time.perf_counter() - begin
        hidden = max((_hidden_bytes(model, batch, s) for s in segments if s.blocks), default=0)
    names = (*solver.needs, *(solver.wants if optional else ())) if solver.needs else ()
    single = tuple(name for name in names if not STATISTICS[name].paired)
    paired = names != single
    room = math.inf if room is None else room

    def passes(block: Sequence[str]) -> int:
        return max(1, math.ceil(_statistics_bytes(names, inputs, block) / room))

    runs = _runs(model, segments, len(batches), paired, passes) if names else _Runs(0.0, 0.0)
    blocks = [  # pairs: in chains only
        (names if s.blocks else single, [name for name in block if name not in s.repeated])
        for s in segments
        for block in s.sites
    ]
    seen = [(kinds, name) for kinds, block in blocks for name in block if name in inputs.tokens]
    shapes = [
        (single if name in inputs.experts else kinds, inputs.shape(name), _device(weights[name]))
        for kinds, name in seen
        for _ in range(inputs.experts.get(name, 1))
    ]
    updates = {shape: _updated(*shape)[1] for shape in set(shapes)}
    return CalibrationCost(
        round(several * max(inputs.tokens.values(), default=0)),
        once * (several * runs.inputs + 2 * bool(names)),  # two to find the blocks, and how they are called
        once * several * runs.outputs,
        several * sum(updates[shape] for shape in shapes),
        _solving(todo.active, solver, inputs),
        round(min(room, max((_statistics_bytes(kinds, inputs, block) for kinds, block in blocks), default=0))),
        math.ceil(hidden * several) * (2 if paired else 1) if names else 0,
        tuple(step.name for step in (*recipe.rewrites, *recipe.tuners)),
    )


class _Inputs(NamedTuple):
    """Of each weight that the first batch reaches: tokens, and (groups, width) of its inputs; of experts their number,
    the tokens of one on average, and one group."""

    tokens: dict[str, int]
    widths: dict[str, tuple[int, int]]
    experts: dict[str, int]

    def see(self, name: str, x: Tensor) -> None:
        self.tokens[name] = self.tokens.get(name, 0) + x.shape[1]
        self.widths[name] = x.shape[0], x.shape[2]

    def see_expert(self, expert: Expert, x: Tensor) -> None:
        self.see(expert.name, x)
        self.experts[expert.name] = expert.count

    def shape(self, name: str) -> tuple[int, int, int]:
        """(groups, tokens, width)"""
        groups, width = self.widths[name]
        return groups, math.ceil(self.tokens[name] / self.experts.get(name, 1)), width


def extent(batch: Any) -> int:
    """Tokens of a batch, or what else the first two axes of its first tensor are; padding counts, as it is computed."""
    leaves = tree_leaves(dict(batch) if hasattr(batch, "keys") else batch)
    return next((math.prod(leaf.shape[:2]) for leaf in leaves if isinstance(leaf, Tensor)), 0)


def _hidden_bytes(model: nn.Module, batch: Any, segment: CalibrationSegment) -> int:
    found: list[int] = []
    blocks = [segment.blocks[0][1]]  # the run stops there
    capture_block_inputs(model, [batch], blocks, ActivationCache(None, ""), lambda x: found.append(int(x.nbytes)))
    return sum(found)


class _Runs(NamedTuple):
    """How often the whole model is run on all data."""

    inputs: float
    outputs: float


def _runs(
    model: nn.Module, segments: Sequence[CalibrationSegment], count: int, paired: bool,
    passes: Callable[[Sequence[str]], int],
) -> _Runs:  # fmt: skip
    """A block runs for its statistics, in float if statistics are paired, and quantized for the next one; weights
    outside of chains take runs of the whole model, and tables that are looked up too some more to compare candidates.
    """
    whole = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    inputs = outputs = 0.0
    for segment in segments:
        if segment.blocks:
            for b, ((_, block), names) in enumerate(zip(segment.blocks, segment.sites, strict=True)):
                share = sum(p.numel() for p in block.parameters() if p.ndim > 1) / max(1, whole)
                own = [name for name in names if name not in segment.repeated]
                times = bool(names) * passes(own)
                again = paired and times > 1  # the float model's outputs after the last pass
                inputs += share * (times + paired * max(1, times) + again) * (b <= segment.last)
                outputs += share * (b < segment.last)
        else:
            inputs += 1
            if segment.looked_up:
                outputs += (3 * min(RATIO_BATCHES, count) / max(1, count) + 4 * HELD_OUT) * len(segment.sites[0])
    return _Runs(inputs, outputs)


def _device(row: PlanRow) -> torch.device:
    assert row.tensor is not None
    return row.tensor.device


def _random(shape: Sequence[int], device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - begin


def _updated(names: Sequence[str], shape: tuple[int, int, int], device: torch.device) -> tuple[dict[str, State], float]:
    """(statistics of random inputs [groups, tokens, width], seconds that adding these takes)"""
    x = _random(shape, device)
    states = {}
    for name in names:
        total, count = STATISTICS[name].init(shape[0], shape[2])
        states[name] = total.to(device), count

    def update() -> None:
        for name in names:
            s = STATISTICS[name]
            states[name] = s.update(states[name], *((x, x) if s.paired else (x,)))

    return states, seconds_of(update, device)


def _statistics_bytes(names: Sequence[str], inputs: _Inputs, block: Sequence[str]) -> int:
    total = 0
    with torch.device("meta"):
        for name in block:
            if name in inputs.widths:
                kinds = [STATISTICS[s] for s in names if name not in inputs.experts or not STATISTICS[s].paired]
                states = [kind.init(*inputs.widths[name])[0] for kind in kinds]
                shared = name in inputs.experts and name.rpartition(".")[2] in FIRST_PROJECTIONS
                total += (inputs.experts.get(name, 1) + shared) * sum(int(state.nbytes) for state in states)
    return total


@dataclass
class _Kind:
    """Weights that take equally long to solve: whole, or matrices of experts. operations: of one, in proportion."""

    row: PlanRow
    shape: tuple[int, ...]
    groups: int
    width: int
    operations: float
    count: int = 0


def _solving(rows: Sequence[PlanRow], solver: Solver, inputs: _Inputs) -> float:
    """Seconds of the solver for all rows. Those without the data that it needs are rounded to nearest, and take none
    to speak of."""
    kinds: dict[Any, _Kind] = {}
    for row in rows:
        if row.call is not None or row.tensor is None or (solver.needs and row.name not in inputs.widths):
            continue
        groups, width = inputs.widths.get(row.name, (1, 1))
        shape, count = (row.shape[1:], row.shape[0]) if _by_expert(row) else (row.shape, 1)
        elements = float(math.prod(shape))
        operations = elements * width + groups * width**3 if "hessian" in solver.needs else elements
        key = (shape, row.scheme, row.layout, groups, width)
        kinds.setdefault(key, _Kind(row, shape, groups, width, operations)).count += count
    total = spent = rate = 0.0  # rate: seconds of an operation in the last trial
    for kind in sorted(kinds.values(), key=lambda k: k.operations):
        if not rate or spent + rate * kind.operations <= SECONDS:
            seconds = _trial(kind, solver)
            spent, rate = spent + seconds, seconds / max(1.0, kind.operations)
        total += rate * kind.operations * kind.count
    return total


def _trial(kind: _Kind, solver: Solver) -> float:
    """Seconds to solve a random weight of this kind, on random statistics."""
    row, device = kind.row, _device(kind.row)
    scheme, site, tensor = row.scheme, row.site, row.tensor
    assert scheme is not None
    assert site is not None
    assert tensor is not None
    x = _random(kind.shape, device).to(tensor.dtype)
    x = x.transpose(-2, -1).contiguous() if site.transposed else x
    names = (*solver.needs, *solver.wants) if solver.needs else ()
    states = _updated(names, (kind.groups, ROWS, kind.width), device)[0]
    seen = CollectedStatistics({name: STATISTICS[name].finish(state) for name, state in states.items()}, ROWS)
    if "hessian" in seen.stats:  # positive definite, as one of enough tokens
        diagonal = seen.stats["hessian"].diagonal(dim1=-2, dim2=-1)
        diagonal.add_(0.1 * diagonal.mean())
    layout, op = (row.layout, site.op) if kind.shape == row.shape else ("plain", "linear")
    return seconds_of(lambda: solve_weight(x, scheme, row.name, layout, op, solver, seen), device)
