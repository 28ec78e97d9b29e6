"""A recipe bound to the tensors of one block: runs the fused steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import fallback
from ..core.errors import ArgumentError
from ..kernels.block import Call, Steps, run_reference
from . import block_cache
from .block_arguments import Reader, mask_refusal
from .recipe import Recipe
from .runner import Runner, runner
from .trace_block import Refusal
from .watch_block import Watch

Compile = Callable[[Steps], Runner | str]


class Bound:
    """One block's steps with its tensors. Raises Refusal if native code cannot run them."""

    def __init__(self, block: nn.Module, recipe: Recipe, compile: Compile | None = None) -> None:
        self.block, self.recipe, self.compile = weakref.ref(block), recipe, compile or runner
        self.steps = recipe.build(block)
        self.whole = self._compiled(self.steps)
        self.halves: tuple[Runner, Runner, Steps] | None = None
        self.watch = Watch(block, recipe)
        self.reader = Reader(block, recipe)
        self.expired = False  # native code found a parameter that changed its memory

    def _compiled(self, steps: Steps) -> Runner:
        found = self.compile(steps)
        if isinstance(found, str):
            raise Refusal(found)
        return found

    def unchanged(self, block: nn.Module) -> bool:
        """Whether the block still consists of the same modules, parameters, attributes and modes."""
        return self.block() is block and not self.expired and self.watch.unchanged()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the block for a call of its forward, or the reason (str) why it is not fused."""
        if self.watch.hooked():
            return "a module in the block has a forward hook"
        read = self.reader.read(args, kwargs)
        if isinstance(read, str):
            return read
        x, call, cache = read
        first = self.recipe.arguments.batch_first
        y = self._attend(x if first else x.transpose(0, 1).contiguous(), call, cache)
        if isinstance(y, str):
            return y
        if not first:
            y = y.transpose(0, 1).contiguous()
        return self.reader.returned(y, args, kwargs)

    # -- keys and values -----------------------------------------------------------------------------------------------

    def _attend(self, x: Tensor, call: Call, cache: Any) -> Tensor | str:
        batch, tokens, _ = x.shape
        recipe, heads = self.recipe, self.recipe.heads
        shape = (batch, heads.shared, tokens, heads.size)
        if cache is None or not recipe.cached:
            if call.mask is not None and (reason := mask_refusal(call.mask, batch, heads.query, tokens, tokens)):
                return reason
            call.causal |= recipe.causal and call.mask is None
            if recipe.cached:
                call.keys, call.values = _empty(shape, x.dtype), _empty(shape, x.dtype)
                call.length = tokens
            return self._native(self.whole, x, call)
        if self.whole.converted():  # the block's own forward gives another dtype
            self.expired = True
            return "a parameter was converted to another dtype or moved"
        cache = getattr(cache, "self_attention_cache", cache)
        layer = block_cache.layer_of(cache, recipe.layer)
        room = None if layer is None else block_cache.room(layer, shape, x.dtype)
        if room is None or (room.codes and tokens > 1 and call.mask is None):  # which tokens are seen then: see _limit
            return self._in_two_parts(x, call, cache, shape)
        length = room.codes + room.length
        if call.mask is not None and (reason := mask_refusal(call.mask, batch, heads.query, tokens, length)):
            return reason
        call.keys, call.values = block_cache.take(layer, room)
        call.past, call.length, call.coded = room.past, room.length, room.coded
        if room.coded is None:
            self._limit(call, tokens)
        y = self._finished(self.whole, self.steps, x, call)
        if block_cache.quantizes(layer):
            layer.quantize_old()
        return y

    def _native(self, runner: Runner, x: Tensor, call: Call) -> Tensor | str:
        """The output, or the reason why native code cannot take the call."""
        try:
            y = runner.run(x, call)
        except ArgumentError as error:
            self.expired = True  # if a parameter changed, the next call binds again
            return str(error)
        return "native code refused the call" if y is None else y

    def _finished(self, runner: Runner, steps: Steps, x: Tensor, call: Call) -> Tensor:
        """The output. The cache has been changed, so the block's own forward cannot run any more: calls that native
        code cannot take are computed by the reference."""
        y = self._native(runner, x, call)
        if isinstance(y, str):
            fallback.count(f"fused block: {y}")
            y = run_reference(steps, x, call)
        return y

    def _limit(self, call: Call, tokens: int) -> None:
        """The number of keys that are read, and whether the mask is causal, as transformers' sdpa attention does."""
        if call.mask is None or call.causal:
            if tokens > 1 and self.recipe.causal:  # it reads the first tokens: the cache was empty
                call.causal, call.length = True, tokens
                call.mask = None if call.mask is None else call.mask[..., :tokens]
        elif call.mask.dtype is torch.bool:
            used = call.past + tokens
            if call.length - used >= 64 and not bool(call.mask[..., used:].any()):
                call.length, call.mask = used, call.mask[..., :used]

    def _in_two_parts(self, x: Tensor, call: Call, cache: Any, shape: Any) -> Tensor | str:
        if self.halves is None:
            parts = self.recipe.parts(self.steps)
            self.halves = self._compiled(parts[0]), self._compiled(parts[1]), parts[1]
        first, second, steps = self.halves
        rows = x.shape[0] * x.shape[1]
        call.kept = {b: _empty((rows, width), torch.float32) for b, width in self.recipe.kept}
        call.keys, call.values = _empty(shape, x.dtype), _empty(shape, x.dtype)
        if isinstance(reason := self._native(first, x, call), str):
            return reason
        keys, values = cache.update(call.keys, call.values, self.recipe.layer)
        call.keys, call.values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
        call.length = keys.shape[2]
        self._limit(call, shape[2])
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            return run_reference(steps, x, call)
        return self._finished(second, steps, x, call)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
