"""Finds the execution order of a model's blocks by running it once.

A chain is a list of modules that are each called once, in order, where the first input of each is the output of the
previous one: decoder layers, encoder layers, the stages of an nn.Sequential. Only blocks of a chain can run alone on
stored inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...planning.run_batch import token_mask
from .float32_products import run_batch
from .input_hooks import Expert, InputHooks

EXPERTS_FORWARD = "_experts_implementation"  # of a config of transformers; model.set_experts_implementation sets it


@dataclass
class CalibrationSegment:
    """Weights that are calibrated together, or a chain of blocks that are calibrated one after another.

    sites       names of weights, by block (a single entry if not a chain)
    blocks      (name, module); empty if not a chain
    looked_up   the model also looks up rows of these weights: embedding tables tied to an output layer
    repeated    weights whose inputs equal those of the weight that is called before, such as keys after queries
    experts     weights with three axes whose matrices are multiplied one by one
    """

    sites: list[list[str]]
    blocks: list[tuple[str, nn.Module]] = field(default_factory=list)
    looked_up: bool = False
    repeated: Set[str] = frozenset()
    experts: Set[str] = frozenset()

    @property
    def last(self) -> int:
        """Index of the last block with weights to calibrate; those after it need not run."""
        return max((b for b, names in enumerate(self.sites) if names), default=-1)


@contextmanager
def inference_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients, KV caches or fused paths that hide layer inputs. Experts of
    transformers are multiplied one by one, by the code of their own class."""
    training = {m: m.training for m in model.modules()}
    # A decoder may have its own config (as in T5); a cache would grow with each run of a block
    configs = {id(c): c for m in model.modules() if getattr(c := getattr(m, "config", None), "use_cache", None)}
    caches = [(config, config.use_cache) for config in configs.values()]
    # Those of a model before those of its parts, because setting one sets its parts'
    configs = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), EXPERTS_FORWARD)}
    ways = [(config, getattr(config, EXPERTS_FORWARD)) for config in configs.values()]
    forwards = [(config, way) for config, way in ways if way not in (None, "eager")]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    for config, _ in caches:
        config.use_cache = False
    for config, _ in forwards:
        setattr(config, EXPERTS_FORWARD, "eager")
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for config, was in caches:
            config.use_cache = was
        for config, way in forwards:
            setattr(config, EXPERTS_FORWARD, way)
        for m, was in training.items():
            m.training = was


def calibration_segments(model: nn.Module, weights: dict[int, str], batch: Any) -> list[CalibrationSegment]:
    """Segments to calibrate, in the model's call order. weights: id -> name.

    Weights that the model does not use for this batch are in no segment (another batch may use them: experts of a
    mixture belong to the segment of their block). A weight of a block that is also read outside the block comes after
    all others, because a block that runs alone shows only part of its inputs; so does a weight that is looked up too.
    """
    lists = _lists(model, set(weights.values()))
    trials = [_Trial(name, blocks) for name, blocks in lists]
    called: dict[str, None] = {}
    looked: set[str] = set()
    repeated: set[str] = set()
    experts: set[str] = set()
    before: Tensor | None = None

    def see(name: str, x: Tensor) -> None:
        nonlocal before
        if name not in called and before is not None and torch.equal(x, before):
            repeated.add(name)
        before = x
        called.setdefault(name)
        read(name)

    def see_expert(expert: Expert, x: Tensor) -> None:
        called.setdefault(expert.name)
        experts.add(expert.name)
        read(expert.name)

    def look(name: str) -> None:
        looked.add(name)
        read(name)

    def read(name: str) -> None:
        for trial in trials:
            trial.readers.setdefault(name, set()).add(trial.inside)

    with ExitStack() as hooks, InputHooks(weights, see, token_mask(batch), look=look, see_expert=see_expert):
        for trial in trials:
            trial.hook(hooks)
        run_batch(model, batch)
    chains: list[_Trial] = []
    for trial in trials:  # outer lists come first
        inside = any(trial.name.startswith(f"{other.name}.") or other.name == "" for other in chains)
        if trial.holds and not inside:
            chains.append(trial)
    several = {name for chain in chains for name in chain.read_elsewhere(weights)} - looked
    alone = {i: name for i, name in weights.items() if name not in looked and name not in several}
    owner = {name: chain for chain in chains for names in chain.sites(alone) for name in names}
    found: list[CalibrationSegment] = []
    placed: set[int] = set()
    for name in called:
        chain = owner.get(name)
        if name in looked or name in several:
            continue
        if chain is None:
            if not found or found[-1].blocks:
                found.append(CalibrationSegment([[]]))
            found[-1].sites[0].append(name)
        elif id(chain) not in placed:
            placed.add(id(chain))
            found.append(CalibrationSegment(chain.sites(alone), chain.blocks))
    for names, looked_up in ((several, False), (looked, True)):
        late = [name for name in called if name in names]
        found += [CalibrationSegment([late], looked_up=looked_up)] if late else []
    for segment in found:
        segment.repeated = repeated.intersection(name for names in segment.sites for name in names)
        segment.experts = experts
    return found


def _lists(model: nn.Module, names: set[str]) -> list[tuple[str, list[tuple[str, nn.Module]]]]:
    """Lists of two or more modules with weights to calibrate in them, outer ones first."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        prefix = f"{name}." if name else ""
        if any(n.startswith(prefix) for n in names):
            found.append((name, [(f"{prefix}{i}", child) for i, child in module.named_children()]))
    return found


class _Trial:
    """A module list that may be a chain."""

    def __init__(self, name: str, blocks: list[tuple[str, nn.Module]]) -> None:
        self.name, self.blocks, self.calls, self.good = name, blocks, 0, True
        self.last: Tensor | None = None
        self.inside: int | None = None  # the block that is running
        self.readers: dict[str, set[int | None]] = {}  # by weight: the blocks that read it; None: read outside of all

    @property
    def holds(self) -> bool:
        return self.good and self.calls == len(self.blocks)

    def hook(self, hooks: ExitStack) -> None:
        for i, (_, block) in enumerate(self.blocks):
            hooks.enter_context(block.register_forward_pre_hook(self._before(i), with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(self._after))

    def _before(self, i: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = hidden_argument(args, kwargs)
            if i != self.calls or x is None or (i and (self.last is None or not same_values(x, self.last))):
                self.good = False
            self.calls += 1
            self.inside = i

        return hook

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.last, self.inside = output_tensor(output), None

    def read_elsewhere(self, weights: dict[int, str]) -> list[str]:
        """Weights of a block that something outside the block reads too."""
        return [n for b, names in enumerate(self.sites(weights)) for n in names if self.readers.get(n, set()) - {b}]

    def sites(self, weights: dict[int, str]) -> list[list[str]]:
        return [[n for n in weights.values() if n.startswith(f"{name}.")] for name, _ in self.blocks]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same values; NaN equals NaN."""
    return a is b or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def hidden_argument(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states passed from block to block: the first argument, or Hugging Face's ``hidden_states``."""
    x = args[0] if args else kwargs.get("hidden_states")
    return x if isinstance(x, Tensor) else None


def output_tensor(output: Any) -> Tensor | None:
    x = output[0] if isinstance(output, (tuple, list)) and output else output
    return x if isinstance(x, Tensor) else None
