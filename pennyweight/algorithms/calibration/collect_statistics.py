"""Collects the statistics of weights' inputs during forward passes of a model, of a block in as many passes as memory
allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...distributed import all_reduce
from ...planning.parameters import FIRST_PROJECTIONS
from .input_hooks import Expert, InputHooks, require_finite, without_padding
from .statistics import STATISTICS, State, Statistic


@dataclass
class CollectedStatistics:
    """Finished statistics of one weight's inputs: by name [G, K, K] or [G, K]; and the number of tokens per group.

    looked_up   the model also looks up rows of the weight; then the statistics are without the batches, or rows of a
                single batch, that :func:`.batches.held_out` sets aside for :data:`HELD_OUT`
    everything  then those of all data
    experts     those of each matrix of a parameter [experts, out, in] whose matrices are multiplied one by one, with
                G = 1; ``stats`` is then empty
    note        for the report
    """

    stats: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    looked_up: bool = False
    everything: CollectedStatistics | None = None
    experts: Sequence[CollectedStatistics] = ()
    note: str = ""


Pass = dict[str, range | None]  # weights whose statistics are collected together; the experts of one, None: all


class BlockStatistics(Mapping[str, CollectedStatistics]):
    """Statistics of some weights, collected in one pass over the data; or in several, each when one of its weights is
    asked for, if those of a block exceed the memory limit. Then these weights must stay as they are until
    :meth:`close`.

    collect     a pass -> its statistics
    last        called once after the last pass, if there are several
    """

    def __init__(
        self, passes: Sequence[Pass], collect: Callable[[Pass], Mapping[str, CollectedStatistics]],
        last: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.passes, self.several = passes, len(passes) > 1
        self._collect, self._last = collect, last if self.several else None
        self._at, self._found = -1, {}  # type: ignore[var-annotated]
        self._of: dict[str, list[int]] = {}
        for i, some in enumerate(passes):
            for name in some:
                self._of.setdefault(name, []).append(i)
        if len(passes) == 1:
            self._pass(0)

    def _pass(self, i: int) -> Mapping[str, CollectedStatistics]:
        if i != self._at:
            self._found = {}  # before the next are collected
            self._at, self._found = i, self._collect(self.passes[i])
        return self._found

    def __getitem__(self, name: str) -> CollectedStatistics:
        i, *others = self._of[name]
        return CollectedStatistics(experts=_Experts(self, name)) if others else self._pass(i)[name]

    def expert(self, name: str, e: int) -> CollectedStatistics:
        for i in self._of[name]:
            if e in self.passes[i][name]:  # type: ignore[operator]
                found = self._pass(i)[name].experts
                return found[e] if found else CollectedStatistics()
        raise IndexError(f"{name} has no expert {e}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def close(self) -> None:
        """All weights are solved, and none is replaced."""
        last, self._last, self._at, self._found = self._last, None, -1, {}
        if last is not None:
            last()


class _Experts(Sequence[CollectedStatistics]):
    """Of a weight whose experts are collected in several passes."""

    def __init__(self, block: BlockStatistics, name: str) -> None:
        self.block, self.name = block, name

    def __len__(self) -> int:
        return sum(len(one[self.name] or ()) for one in self.block.passes if self.name in one)

    def __getitem__(self, e: Any) -> Any:
        return self.block.expert(self.name, range(len(self))[e])


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


ExpertStates = dict[int, dict[str, State]]  # by expert, of each statistic


class Collector:
    """Collects the statistics of some weights during forward passes. Weights with the same inputs, such as those of
    queries, keys and values, share them: one Hessian instead of three. Experts get no paired statistics: a router may
    give an expert other tokens in the float model.

    Means over the inputs of an expert's first projection count the tokens of all experts too, with the weight of as
    many tokens as there are inputs: few tokens of its own say little about directions that they do not show.

    weights     id of a parameter -> its name
    modules     those of experts (:func:`.input_hooks.expert_modules`), by name
    only        name -> the experts whose statistics are collected; default: all
    """

    def __init__(
        self, weights: dict[int, str], modules: Mapping[str, nn.Module], single: Sequence[Statistic],
        paired: Sequence[Statistic] = (), only: Mapping[str, range | None] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.weights, self.modules, self.single, self.paired, self.only = weights, modules, single, paired, only
        self.experts: dict[str, ExpertStates] = {}
        self.counts: dict[str, int] = {}  # of experts
        self.shared: dict[str, dict[str, State]] = {}  # of the tokens of all experts
        names = set(weights.values())
        self.first = {
            name: module
            for path, module in modules.items()
            for name in (f"{path}.{param}" if path else param for param in FIRST_PROJECTIONS)
            if name in names
        }
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

        with without_padding(self.modules.values(), mask), InputHooks(self.weights, see, mask):
            return run()

    def run(self, run: Callable[[], Any], mask: Tensor | None) -> None:
        with (
            without_padding(self.modules.values(), mask),
            ExitStack() as hooks,
            InputHooks(self.weights, self._see, mask, see_expert=self._see_expert),
        ):
            for name, module in self.first.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._see_all, name)))
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

    def _see_all(self, name: str, module: nn.Module, args: Any) -> None:
        """The tokens of all experts, when their module is called."""
        if args and isinstance(args[0], Tensor) and args[0].ndim == 2 and len(args[0]):
            x = args[0].detach().unsqueeze(0).float()
            require_finite(name, x)
            for statistic in self.single:
                if statistic.mean:
                    self._update(self.shared.setdefault(name, {}), statistic, x)

    def _see_expert(self, expert: Expert, x: Tensor) -> None:
        only = self.only.get(expert.name)
        if not x.shape[1] or (only is not None and expert.index not in only):
            return
        require_finite(f"{expert.name}[{expert.index}]", x)
        self.counts[expert.name] = expert.count
        states = self.experts.setdefault(expert.name, {}).setdefault(expert.index, {})
        for statistic in self.single:
            self._update(states, statistic, x)

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
        experts = {name: {e: dict(one) for e, one in some.items()} for name, some in self.experts.items()}
        shared, self.shared = self.shared, {}
        if not more:
            self.groups, self.experts = [], {}
        if all_reduce.is_distributed():
            tokens, groups = self._of_all_ranks(tokens, groups)
            experts = self._experts_of_all_ranks(experts)
            shared = self._shared_of_all_ranks(shared)
        found = {name: CollectedStatistics({}, n) for name, n in tokens.items()}
        for group in groups:
            for statistic in list(group.states):
                value = STATISTICS[statistic].finish(group.states.pop(statistic))
                for name in group.names:
                    found[name].stats[statistic] = value
        for name, some in experts.items():
            only, every = self.only.get(name), shared.pop(name, {})
            found[name].experts = [
                _finished(some.pop(e, {}), every if only is None or e in only else {}) for e in range(self.counts[name])
            ]
        return found

    def _shared_of_all_ranks(self, shared: dict[str, dict[str, State]]) -> dict[str, dict[str, State]]:
        merged: dict[str, dict[str, State]] = {}
        for name in self.first:
            own = shared.get(name, {})
            for statistic in [statistic for statistic in self.single if statistic.mean]:
                state = all_reduce.merge_states(statistic, own.pop(statistic.name, None))
                if state is not None:
                    merged.setdefault(name, {})[statistic.name] = state
        return merged

    def _experts_of_all_ranks(self, experts: dict[str, ExpertStates]) -> dict[str, ExpertStates]:
        """Merged, one statistic of one expert at a time."""
        merged: dict[str, ExpertStates] = {}
        seen = {name: (self.counts[name], set(some)) for name, some in experts.items()}
        everywhere = all_reduce.gather_objects(seen)
        for name in self.weights.values():
            ranks = [one[name] for one in everywhere if name in one]
            for e in sorted(set().union(*(some for _, some in ranks))):
                self.counts[name] = ranks[0][0]
                own = experts.get(name, {}).get(e, {})
                states = merged.setdefault(name, {}).setdefault(e, {})
                for statistic in self.single:
                    state = all_reduce.merge_states(statistic, own.pop(statistic.name, None))
                    assert state is not None  # a rank has it
                    states[statistic.name] = state
        return merged

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


def _finished(states: dict[str, State], shared: Mapping[str, State]) -> CollectedStatistics:
    """Of one expert, whose states are used up, and of all."""
    own = max((count for _, count in states.values()), default=0)
    for name, (total, count) in shared.items():
        width = total.shape[-1]
        mine, n = states.get(name) or STATISTICS[name].init(1, width)
        states[name] = mine.to(total.device).add_(total, alpha=width / max(1, count)), n + width
    tokens = max((count for _, count in states.values()), default=0)
    found = {name: STATISTICS[name].finish(states.pop(name)) for name in list(states)}
    return CollectedStatistics(found, tokens, note="" if own or not shared else "solved with the tokens of all experts")
