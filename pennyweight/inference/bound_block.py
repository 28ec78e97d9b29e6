"""A description bound to the tensors of one block: runs the fused steps, in native calls or by the plain reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..core import fallback
from ..kernels.block import Call, Steps, run_reference
from ..kernels.native.block import compile_steps
from ..support.errors import ArgumentError, Refusal
from . import block_cache
from .block_arguments import Read, Reader, mask_refusal
from .block_description import BlockDescription, CrossPart
from .describe_block import is_pair
from .detect_changes import Watch

Kept = dict[int, Tensor]
CHOICE = "_attn_implementation_internal"  # in a config of transformers: the attention function


def no_block() -> None:
    """In place of a weak reference."""


class Runner(Protocol):
    """``run``: None if native code cannot take the call. ``converted``: whether a parameter has another dtype or
    device than when the steps were compiled."""

    def run(self, x: Tensor, call: Call) -> Tensor | None: ...

    def converted(self) -> bool: ...


class Reference:
    """The plain reference, for checks."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def run(self, x: Tensor, call: Call) -> Tensor | None:
        return run_reference(self.steps, x, call)

    def converted(self) -> bool:
        return False


Compile = Callable[[Steps], Runner | str]


class Part(NamedTuple):
    """Some of the steps of a block, and the buffers in them that other parts use, too."""

    runner: Runner
    steps: Steps
    kept: tuple[int, ...]


class Bound:
    """One block's steps with its tensors. Raises Refusal if native code cannot run them."""

    def __init__(self, block: nn.Module, description: BlockDescription, compile: Compile | None = None) -> None:
        self.module, self.description, self.compile = weakref.ref(block), description, compile or compile_steps
        self.steps = description.build(block)
        self.end = len(self.steps.steps) if description.cross is None else description.cross.cut
        self.parts: dict[tuple[int, int], Part] = {}
        self.whole = self.part(0, self.end)  # up to cross-attention, if there is one
        self.across = None if description.cross is None else CrossAttention(block, description.cross)
        self.watch = Watch(block, _trains, _choice(block, description))
        self.reader = Reader(block, description)
        self.expired = False  # native code found a parameter that changed its memory
        self.next: Callable[[], Bound | None] = no_block  # the fused block that gets the output of this one
        self.stack: Any = None  # of the blocks that follow; see lazy_output.py
        self.tries = 0

    def part(self, begin: int, end: int) -> Part:
        """Some of the steps, compiled at the first use."""
        made = self.parts.get((begin, end))
        if made is None:
            steps, kept = self.description.part(self.steps, begin, end)
            runner = self.compile(steps)
            if isinstance(runner, str):
                raise Refusal(runner)
            made = self.parts[begin, end] = Part(runner, steps, kept)
        return made

    def unchanged(self, block: nn.Module) -> bool:
        """Whether the block still consists of the same modules, parameters, attributes and modes."""
        return self.module() is block and not self.expired and self.watch.unchanged()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the block for a call of its forward, or the reason (str) why it is not fused."""
        if self.watch.hooked():
            return "a module in the block has a forward hook"
        read = self.reader.read(args, kwargs)
        if isinstance(read, str):
            return read
        first = self.description.arguments.batch_first
        x = read.x if first else read.x.transpose(0, 1).contiguous()
        kept: Kept = {}
        if self.across is None:
            y = self._attend(x, read.call, read.cache, kept)
        else:
            y = self._attend_twice(x, read, kept, self.across)
        if isinstance(y, str):
            return y
        if not first:
            y = y.transpose(0, 1).contiguous()
        return self.reader.returned(y, args, kwargs)

    # -- keys and values -----------------------------------------------------------------------------------------------

    def _attend(self, x: Tensor, call: Call, cache: Any, kept: Kept) -> Tensor | str:
        batch, tokens, _ = x.shape
        description, heads = self.description, self.description.heads
        shape = (batch, heads.shared, tokens, heads.size)
        if cache is None or not description.cached:
            if isinstance(made := self.call_for(call, batch, tokens, None), str):
                return made
            if description.cached:
                call.keys, call.values = self.no_cache(batch, tokens, x.dtype)
            return self._native(self.whole, x, call, kept)
        if self.whole.runner.converted():  # the block's own forward gives another dtype
            self.expired = True
            return "a parameter was converted to another dtype or moved"
        layer, room = self.room(cache, call, shape, x.dtype)
        if room is None:
            return self._in_two_parts(x, call, getattr(cache, "self_attention_cache", cache), shape, kept)
        if isinstance(made := self.call_for(call, batch, tokens, room), str):
            return made
        call.keys, call.values = block_cache.take(layer, room)
        y = self._finished(self.whole, x, call, kept)
        if block_cache.quantizes(layer):
            layer.quantize_old()
        return y

    def room(
        self, cache: Any, call: Call, shape: tuple[int, int, int, int], dtype: torch.dtype
    ) -> tuple[Any, block_cache.Room | None]:
        """The block's layer of a cache, and room in it for keys and values of this shape; nothing is changed. None: the
        cache's own ``update`` must be called."""
        layer = block_cache.layer_of(getattr(cache, "self_attention_cache", cache), self.description.layer)
        room = None if layer is None else block_cache.room(layer, shape, dtype)
        if room is not None and room.codes and shape[2] > 1 and call.mask is None:  # which tokens are seen: see _limit
            return layer, None
        return layer, room

    def call_for(self, call: Call, batch: int, tokens: int, room: block_cache.Room | None) -> Call | str:
        """The call, with the place of its tokens in a cache, if there is one; or the reason why it is not fused."""
        length = tokens if room is None else room.codes + room.length
        mask, query = call.mask, self.description.heads.query
        if mask is not None and (reason := mask_refusal(mask, batch, query, tokens, length)):
            return reason
        if room is None:
            call.causal |= self.description.causal and mask is None
            call.length = tokens if self.description.cached else 0
            return call
        call.past, call.length, call.coded = room.past, room.length, room.coded
        if room.coded is None:
            self._limit(call, tokens)
        elif mask is not None:
            call.mask = room.reordered(mask)
        return call

    def no_cache(self, batch: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for keys and values [batch, heads, tokens, channels] of a call without a cache."""
        shape = batch, self.description.heads.shared, tokens, self.description.heads.size
        return _empty(shape, dtype), _empty(shape, dtype)

    def _attend_twice(self, x: Tensor, read: Read, kept: Kept, across: CrossAttention) -> Tensor | str:
        """With cross-attention, whose keys and values are computed once for all calls with a cache."""
        batch, tokens, _ = x.shape
        stored = across.held(read.cache, batch, x.dtype)
        if isinstance(stored, str):
            return stored
        length = read.states.shape[1] if stored is None else stored[0].shape[2]  # type: ignore[union-attr]
        call = Call(mask=read.states_mask, length=length)
        if call.mask is not None:
            if call.mask.shape[2] == 1 != tokens:
                call.mask = call.mask.expand(-1, -1, tokens, -1)
            if reason := mask_refusal(call.mask, batch, across.heads.query, tokens, length):
                return reason
        second = self.part(self.end, len(self.steps.steps))
        kept.update(_buffers(self.description.cross.kept, batch * tokens))  # type: ignore[union-attr]
        y = self._attend(x, read.call, read.cache, kept)
        if isinstance(y, str):
            return y
        call.keys, call.values = across.computed(read.cache, read.states) if stored is None else stored  # type: ignore[arg-type]
        return self._finished(second, x, call, kept)

    def _native(self, part: Part, x: Tensor, call: Call, kept: Kept) -> Tensor | str:
        """The output, or the reason why native code cannot take the call."""
        call.kept = {b: kept[b] for b in part.kept if b in kept}
        try:
            y = part.runner.run(x, call)
        except ArgumentError as error:
            self.expired = True  # if a parameter changed, the next call binds again
            return str(error)
        return "native code refused the call" if y is None else y

    def _finished(self, part: Part, x: Tensor, call: Call, kept: Kept) -> Tensor:
        """The output. The cache has been changed, so the block's own forward cannot run any more: calls that native
        code cannot take are computed by the reference."""
        y = self._native(part, x, call, kept)
        if isinstance(y, str):
            fallback.count(f"fused block: {y}")
            y = run_reference(part.steps, x, call)
        return y

    def _limit(self, call: Call, tokens: int) -> None:
        """The number of keys that are read, and whether the mask is causal, as transformers' sdpa attention does."""
        if call.mask is None or call.causal:
            if tokens > 1 and self.description.causal:  # it reads the first tokens: the cache was empty
                call.causal, call.length = True, tokens
                call.mask = None if call.mask is None else call.mask[..., :tokens]
        elif call.mask.dtype is torch.bool:
            used = call.past + tokens
            if call.length - used >= 64 and not bool(call.mask[..., used:].any()):
                call.length, call.mask = used, call.mask[..., :used]

    def _in_two_parts(self, x: Tensor, call: Call, cache: Any, shape: Any, kept: Kept) -> Tensor | str:
        description = self.description
        first, second = self.part(0, description.cut), self.part(description.cut, self.end)
        kept.update(_buffers(description.kept, x.shape[0] * x.shape[1]))
        call.keys, call.values = _empty(shape, x.dtype), _empty(shape, x.dtype)
        if isinstance(reason := self._native(first, x, call, kept), str):
            return reason
        keys, values = cache.update(call.keys, call.values, description.layer)
        call.keys, call.values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
        call.length = keys.shape[2]
        self._limit(call, shape[2])
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            call.kept = {b: kept[b] for b in second.kept if b in kept}
            return run_reference(second.steps, x, call)
        return self._finished(second, x, call, kept)


def _trains(module: nn.Module) -> bool:
    """Whether a module of a block may compute something else in training mode."""
    return any(True for _ in module.children()) or "dropout" in type(module).__name__.lower()


def _choice(block: nn.Module, description: BlockDescription) -> list[tuple[dict[str, Any], str]]:
    """Where transformers keeps its choice of the attention function."""
    path, choice = description.attention
    config: Any = block.get_submodule(path).config if choice else None  # a property would cost 1 µs at each call
    return [(config.__dict__, CHOICE)] if choice else []


def _buffers(kept: tuple[tuple[int, int], ...], rows: int) -> Kept:
    return {b: _empty((rows, width), torch.float32) for b, width in kept}


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


class CrossAttention:
    """Keys and values of cross-attention in one block: computed once for each text, by its own linear layers, and kept
    in transformers' cache."""

    def __init__(self, block: nn.Module, part: CrossPart) -> None:
        self.heads, self.layer = part.heads, part.layer
        self.layers = block.get_submodule(part.keys), block.get_submodule(part.values)

    def held(self, cache: Any, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | str | None:
        """Keys and values [batch, heads, n, channels] in the cache; None if they must be computed; or the reason (str)
        why they cannot be read."""
        if cache is None:
            return None
        if not is_pair(cache):
            return "the cache is not an EncoderDecoderCache"
        if not cache.is_updated.get(self.layer):
            return None
        layer = cache.cross_attention_cache.layers[self.layer]
        keys, values = layer.keys, layer.values
        for t in (keys, values):
            if type(t) is not Tensor or not t.is_cpu or t.dtype is not dtype or t.ndim != 4 or t.stride(3) != 1:
                return "keys and values of cross-attention are not tensors in memory"
            if (t.shape[0], t.shape[1], t.shape[3]) != (batch, self.heads.shared, self.heads.size):
                return f"keys and values of cross-attention have shape {list(t.shape)}"
            if t.is_neg() or (t.requires_grad and torch.is_grad_enabled()) or t.shape != keys.shape:
                return "keys and values of cross-attention need a gradient or are a view that is not computed"
        return keys, values

    def computed(self, cache: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``states`` [batch, n, channels]; the cache gets them."""
        batch, length, _ = states.shape
        shape = batch, length, self.heads.shared, self.heads.size
        keys, values = (layer(states).view(shape).transpose(1, 2) for layer in self.layers)
        if cache is None:
            return keys, values
        keys, values = cache.cross_attention_cache.update(keys, values, self.layer)
        cache.is_updated[self.layer] = True
        return keys, values
