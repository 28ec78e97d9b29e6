"""Fused blocks that follow each other, as one native call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core import fallback
from ..kernels.block import Call, run_reference
from ..kernels.native.block import NativeBlock, NativeStack
from ..support.errors import ArgumentError, Refusal
from . import block_cache
from .block_arguments import Read
from .detect_changes import has_hooks

if TYPE_CHECKING:
    from .bound_block import Bound

_NEXT = attrgetter("next")
_SEEN = ("forward", "_compiled_call_impl")  # in the dict of a module: something else sees what goes in and comes out


class Outputs(NamedTuple):
    """Of all blocks but the last one [blocks - 1, batch, tokens, width], and of the last one [batch, tokens, width]."""

    between: Tensor
    last: Tensor

    def of(self, index: int) -> Tensor:
        return self.between[index] if index < self.between.shape[0] else self.last


class BlockStack:
    """Fused blocks of which each gets the output of the one before it. Raises Refusal if they do not fit each other.

    A block that is called many times in a pass may be in it once.
    """

    def __init__(self, bounds: Sequence[Bound]) -> None:
        if len(bounds) < 2:
            raise Refusal("needs two blocks")
        runners = [bound.whole.runner for bound in bounds]
        natives = [runner for runner in runners if isinstance(runner, NativeBlock)]
        if len(natives) < len(runners):
            raise Refusal("needs blocks that run natively")
        if any(
            b.reader.at or b.description.cross is not None or not b.description.arguments.batch_first for b in bounds
        ):
            raise Refusal("needs blocks without cross-attention, whose first argument is [batch, tokens, width]")
        self.bounds, self.native = tuple(bounds), NativeStack(natives)
        modules = [bound.module() for bound in bounds]
        self.classes: list[Any] = [type(module) for module in modules]
        if any(getattr(cls, "bound", None) is not bound for cls, bound in zip(self.classes, bounds, strict=True)):
            raise Refusal("needs blocks that are still fused")
        self.links = [bound.next for bound in bounds]
        self.watched = tuple(
            tuple(entry for bound in bounds for entry in getattr(bound.watch, name))
            for name in ("dicts", "keys", "values")
        )
        self.hooks = tuple(hooks for bound in bounds for hooks in bound.watch.hooks)
        dicts = [module.__dict__ for module in modules]
        self.outer_hooks = tuple(d[name] for d in dicts for name in ("_forward_hooks", "_forward_pre_hooks"))
        self.backward_hooks = tuple(d[name] for d in dicts for name in ("_backward_hooks", "_backward_pre_hooks"))
        self.outer = [(d, name) for d in dicts for name in _SEEN]

    def linked(self) -> bool:
        """Whether the blocks are still known to follow each other."""
        return all(map(is_, map(_NEXT, self.bounds), self.links))

    def unobserved(self) -> bool:
        """Whether nothing but the caller sees inputs and outputs of the blocks: hooks, compilers, other forwards."""
        return not (
            has_hooks(self.outer_hooks) or any(self.backward_hooks)
            or any(d.get(name) is not None for d, name in self.outer)
        )  # fmt: skip

    def unchanged(self) -> bool:
        """Whether all blocks are still what was fused, and no hook needs what is inside of them."""
        bounds = self.bounds
        return (
            all(cls.bound is bound and not bound.expired for cls, bound in zip(self.classes, bounds, strict=True))
            and all(type(bound.module()) is cls for cls, bound in zip(self.classes, bounds, strict=True))
            and all(map(is_, map(dict.get, *self.watched[:2]), self.watched[2])) and not has_hooks(self.hooks)
        )  # fmt: skip

    def run(self, x: Tensor, reads: Sequence[Read], which: Sequence[int]) -> Outputs | None:
        """The outputs of the first len(which) blocks for the input x of the first one. Block i is called with the
        arguments reads[which[i]].

        None if they cannot run together; nothing was changed then. Raises MemoryError.
        """
        if not self.unchanged():
            return None
        try:
            ready = self.native.take()
        except ArgumentError:  # each block finds its own
            return None
        try:
            planned = self._calls(x, reads, which)
            if planned is None:
                return None
            calls, like, layers = planned
            try:
                found, problem = self.native.run(ready, x, calls, like), "a mode, tracer or transform must see the call"
            except ArgumentError as error:
                for bound in self.bounds:
                    bound.expired = True
                found, problem = None, str(error)
        finally:
            self.native.give_back(ready)
        if found is None:  # caches have been changed, so the blocks' own forwards cannot run any more
            fallback.count(f"fused block: {problem}")
        outputs = self._reference(x, calls) if found is None else Outputs(*found)
        for layer in layers:
            if block_cache.quantizes(layer):
                layer.quantize_old()
        return outputs

    def _reference(self, x: Tensor, calls: Sequence[Call]) -> Outputs:
        outputs = [x]
        for bound, call in zip(self.bounds, calls, strict=False):
            outputs.append(run_reference(bound.whole.steps, outputs[-1], call))
        return Outputs(torch.stack(outputs[1:-1]) if len(outputs) > 2 else x.new_empty((0, *x.shape)), outputs[-1])

    def _calls(
        self, x: Tensor, reads: Sequence[Read], which: Sequence[int]
    ) -> tuple[list[Call], list[int], list[Any]] | None:
        """Arguments of the native call for each block, which earlier call they equal but for keys and values, and the
        layers of caches, which get room for the new tokens. None: nothing was changed."""
        batch, tokens, _ = x.shape
        rooms: list[tuple[Any, block_cache.Room | None]] = []
        layers: set[int] = set()
        alike: dict[Any, tuple[int, Call]] = {}
        found: list[tuple[int, Call]] = []
        for i, (bound, group) in enumerate(zip(self.bounds, which, strict=False)):
            description, read = bound.description, reads[group]
            heads = description.heads
            shape = batch, heads.shared, tokens, heads.size
            layer = room = None
            if read.cache is not None and description.cached:
                layer, room = bound.room(read.cache, read.call, shape, x.dtype)
                if room is None or id(layer) in layers:  # two blocks append to one layer
                    return None
                layers.add(id(layer))
            rooms.append((layer, room))
            place = None if room is None else (room.past, room.length, room.codes, room.sinks)
            key = group, description.causal, description.cached, heads.query, shape, place
            known = alike.get(key)
            if known is None:
                call = bound.call_for(_copy(read.call), batch, tokens, room)
                if isinstance(call, str):
                    return None
                known = alike[key] = i, call
            found.append(known)
        calls = []
        for (_, call), (layer, room), bound in zip(found, rooms, self.bounds, strict=False):
            if room is None and call.keys is None and bound.description.cached:
                call.keys, call.values = bound.no_cache(batch, tokens, x.dtype)
            own = _copy(call)
            if room is not None:
                own.keys, own.values = block_cache.take(layer, room)
                own.coded = room.coded
            calls.append(own)
        return calls, [i for i, _ in found], [layer for layer, _ in rooms]


def _copy(call: Call) -> Call:
    return Call(
        call.cos, call.sin, call.mask, call.causal, call.window, call.keys, call.values, call.past, call.length,
        call.coded,
    )  # fmt: skip


def stack_of(first: Bound) -> BlockStack | None:
    """The stack of the blocks that have followed each other, from this one on; None if they cannot run together."""
    found = list(_followers(first))
    try:
        return BlockStack(found)
    except Refusal:
        return None


def _followers(first: Bound) -> Iterator[Bound]:
    seen: set[int] = set()
    bound: Any = first
    while bound is not None and id(bound) not in seen:
        seen.add(id(bound))
        yield bound
        bound = bound.next()
