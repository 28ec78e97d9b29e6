"""The loss of a model with one weight replaced, for each of several values of each of its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ...distributed.rank_group import RankGroup
from ...planning.parameters import Place
from ..calibration.activation_cache import (
    STATES,
    ActivationCache,
    advance_block,
    capture_block_inputs,
    other_arguments,
    run_block,
)
from ..calibration.block_order import (
    CalibrationSegment,
    calibration_segments,
    hidden_argument,
    inference_mode,
    same_values,
)
from ..calibration.estimate_cost import seconds_of
from ..calibration.float32_products import run_batch
from ..tuners import losses


class Trials(NamedTuple):
    """Values to try for one weight, each made when it is needed."""

    places: Sequence[Place]
    values: Sequence[Callable[[], Tensor]]


class Value(NamedTuple):
    """One value of one weight."""

    name: str
    places: Sequence[Place]
    make: Callable[[], Tensor]


class Sensitivities:
    """Measures the mean divergence on ``batches`` from the model's own outputs.

    folder   for the model's hidden states; None: in memory
    room     bytes for hidden states of replaced weights; None: those of one value on all batches
    team     ranks that have the same model and data: each measures some values, and all get all divergences
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], measure: losses.Divergence, folder: Path | None = None,
        room: float | None = None, team: RankGroup | None = None,
    ) -> None:  # fmt: skip
        self.model, self.batches, self.measure = model, batches, measure
        self.folder, self.room, self.team = folder, room, team or RankGroup()
        self.expected = losses.references(model, batches)

    def whole(self, places: Mapping[str, Sequence[Place]], weights: Mapping[str, Tensor]) -> float:
        """The divergence with some weights replaced."""
        with _replaced(places, weights):
            return losses.mean_divergence(self.model, self.batches, self.expected, self.measure)

    def each(self, trials: Mapping[str, Trials]) -> Iterator[tuple[str, list[float]]]:
        """(name, divergence for each value) of each weight: all other weights are the model's own.

        Weights of a chain of blocks are measured block by block, from stored inputs of their block: what is before it
        is not run again, and each later block is run for many values at once, so that its weights are read from their
        files once. The bits are those of runs of the whole model, by which all other weights are measured.
        """
        left = dict(trials)
        with inference_mode(self.model):
            for segment, chain in self.chains({name: some.places for name, some in trials.items()}):
                for b, names in enumerate(segment.sites[: segment.last + 1]):
                    if names:
                        yield from self._shared({name: left.pop(name) for name in names}, partial(chain.measure, b))
                    if b < segment.last:
                        chain.advance(b)
        names = list(left)
        for start in range(0, len(names), self.team.size):  # as many weights as ranks: each has as many values
            some = names[start : start + self.team.size]
            yield from self._shared({name: left[name] for name in some}, self._whole_runs)

    def chains(self, places: Mapping[str, Sequence[Place]]) -> Iterator[tuple[CalibrationSegment, Chain]]:
        """The chains of blocks with these weights whose blocks can be run alone, on stored hidden states."""
        tensors = {id(some[0].get()): name for name, some in places.items()}
        segments = calibration_segments(self.model, tensors, self.batches[0]) if places else []
        for segment in [segment for segment in segments if segment.blocks]:
            kept = nullcontext() if self.folder is None else tempfile.TemporaryDirectory(dir=self.folder, prefix=STATES)
            with kept as place:
                chain = Chain(self, [block for _, block in segment.blocks], place)
                if all(self.team.step(chain.holds)):
                    yield segment, chain

    def _shared(
        self, trials: Mapping[str, Trials], measure: Callable[[Sequence[Value]], list[float]]
    ) -> Iterator[tuple[str, list[float]]]:
        """(name, divergence for each value) of each weight: each rank measures every ``size``-th value."""
        values = [Value(name, some.places, make) for name, some in trials.items() for make in some.values]
        rank, size = self.team.rank, self.team.size
        found = self.team.step(lambda: measure(values[rank::size]))
        divergences = iter([found[v % size][v // size] for v in range(len(values))])
        for name, some in trials.items():
            yield name, [next(divergences) for _ in some.values]

    def _whole_runs(self, values: Sequence[Value]) -> list[float]:
        return [self.whole({name: places}, {name: make()}) for name, places, make in values]


class Chain:
    """A chain of blocks in a model, run on stored hidden states of the float model."""

    def __init__(self, of: Sensitivities, blocks: Sequence[nn.Module], folder: str | None) -> None:
        self.of, self.blocks = of, blocks
        self.hidden = ActivationCache(None if folder is None else Path(folder), "float")
        self.rest = capture_block_inputs(of.model, of.batches, blocks, self.hidden)
        self.others: list[tuple[Any, ...] | None] = []  # by block: what it returns beside hidden states; None: nothing

    def holds(self) -> bool:
        """Whether the model's output depends on a block only by the hidden states that the last block returns, and
        single runs of the blocks have the bits of the whole model. Tried on the first batch: with NaN in place of all
        other outputs of blocks, every block must get the same arguments, and the output must be the same."""
        x, returned = self.hidden.get(0), []
        for b, block in enumerate(self.blocks):
            hook = block.register_forward_hook(lambda module, args, out: returned.append(out))
            try:
                y = run_block(block, x, self.rest(0, b))
            finally:
                hook.remove()
            out = returned.pop()
            if type(out) not in (Tensor, tuple) or y.shape != x.shape or y.dtype != x.dtype:
                return False
            self.others.append(out[1:] if isinstance(out, tuple) else None)
            if any(isinstance(leaf, Tensor) for leaf in tree_flatten(self.others[-1])[0]):
                return False
            x = y
        calls: list[Any] = []
        out = self._output(0, x, calls)
        return (
            len(calls) == len(self.blocks)
            and all(_equal(call, self.rest(0, b)) for b, call in enumerate(calls))
            and same_values(losses.compared_tensor(out), self.of.expected[0])
        )

    def advance(self, b: int) -> None:
        advance_block(self.hidden, range(len(self.of.batches)), b, self.blocks[b], self.rest)

    def measure(self, b: int, values: Sequence[Value]) -> list[float]:
        """The divergences of values of the weights of block b, whose inputs are the stored hidden states."""
        of = self.of
        totals = [0.0] * len(values)
        count = range(len(of.batches))
        largest = max(int(self.hidden.get(i).nbytes) for i in count)
        at_once = len(count) if of.room is None else max(1, int(of.room // max(1, largest)))
        runs = [(v, i) for v in range(len(values)) for i in count]
        for start in range(0, len(runs), at_once):
            states: dict[tuple[int, int], Tensor] = {}
            for v, some in groupby(runs[start : start + at_once], lambda run: run[0]):
                name, places, make = values[v]
                with _replaced({name: places}, {name: make()}):
                    for _, i in some:
                        states[v, i] = run_block(self.blocks[b], self.hidden.get(i), self.rest(i, b))
            for c in range(b + 1, len(self.blocks)):
                for (v, i), x in states.items():
                    states[v, i] = run_block(self.blocks[c], x, self.rest(i, c))
            while states:
                v, i = next(iter(states))
                out = losses.compared_tensor(self._output(i, states.pop((v, i))))
                totals[v] += float(of.measure(of.expected[i], out, of.batches[i]))
        return [total / len(count) for total in totals]

    def seconds(self) -> list[float]:
        """Of each block: the time of a trial of one of its weights on the first batch, from the block on."""
        device, x, took = self.hidden.get(0).device, self.hidden.get(0), []

        def run(block: nn.Module, b: int) -> None:
            nonlocal x
            x = run_block(block, x, self.rest(0, b))

        def compare() -> None:
            out = losses.compared_tensor(self._output(0, x))
            float(self.of.measure(self.of.expected[0], out, self.of.batches[0]))

        for b, block in enumerate(self.blocks):
            took.append(seconds_of(partial(run, block, b), device))
        end = seconds_of(compare, device)
        return [sum(took[b:]) + end for b in range(len(took))]

    def _output(self, i: int, x: Tensor, calls: list[Any] | None = None) -> Any:
        """The model's output for a batch if the last block returns x. calls: filled with the blocks' arguments."""
        nothing = torch.full_like(x, torch.nan)

        def stand_in(b: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if calls is not None and hidden_argument(args, kwargs) is not None:
                    calls.append(other_arguments(args, kwargs))
                y, others = x if b == len(self.blocks) - 1 else nothing, self.others[b]
                return y if others is None else (y, *others)

            return forward

        with ExitStack() as stack:
            for b, block in enumerate(self.blocks):
                stack.enter_context(_forward_of(block, stand_in(b)))
            return run_batch(self.of.model, self.of.batches[i])


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for a module, whose attributes the model may read."""
    own = {"forward": module.__dict__["forward"]} if "forward" in module.__dict__ else {}
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(own)


def _equal(a: Any, b: Any) -> bool:
    """Whether two calls have equal arguments: tensors by their values, objects by identity."""
    (some, how), (others, too) = tree_flatten(a), tree_flatten(b)

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.dtype == y.dtype and same_values(x, y)
        return x is y or (type(x) is type(y) and isinstance(x, (bool, int, float, str, torch.dtype)) and x == y)

    return bool(how == too) and all(map(same, some, others))


@contextmanager
def _replaced(places: Mapping[str, Sequence[Place]], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Some weights of the model replaced; restores them afterwards."""
    before = {name: places[name][0].get() for name in weights}
    try:
        for name, w in weights.items():
            value = nn.Parameter(w, requires_grad=False)
            for place in places[name]:
                place.set(value)
        yield
    finally:
        for name, w in before.items():
            for place in places[name]:
                place.set(w)
