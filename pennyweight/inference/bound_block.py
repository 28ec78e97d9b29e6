"""A recipe bound to the tensors of one block: checks each call and runs the fused steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import in_memory
from ..kernels.block import Call, Steps
from . import block_cache
from .random_values import zeros
from .recipe import Recipe
from .runner import Runner, runner
from .trace_block import Refusal

_GLOBAL_HOOKS = (_modules._global_forward_hooks, _modules._global_forward_pre_hooks)
_CAPTURING = "transformers.utils.output_capturing"
CHOICE = "_attn_implementation_internal"  # in a config of transformers: the attention function
Compile = Callable[[Steps], Runner | str]


class Bound:
    """One block's steps with its tensors. Raises Refusal if native code cannot run them.

    A call is not fused if something in the block has changed since, or needs the original forward; :meth:`run` then
    returns the reason.
    """

    def __init__(self, block: nn.Module, recipe: Recipe, compile: Compile | None = None) -> None:
        self.block, self.recipe, self.compile = weakref.ref(block), recipe, compile or runner
        self.steps = recipe.build(block)
        self.whole = self._compiled(self.steps)
        self.heads = recipe.heads.query, recipe.heads.shared, recipe.heads.size
        self.halves: tuple[Runner, Runner] | None = None
        self.parameters: list[Any] = []
        watched: list[tuple[dict[str, Any], str, Any]] = []
        hooks: list[Any] = []
        for name in recipe.parameters():
            path, _, own = name.rpartition(".")
            held: Any = block.get_submodule(path)._parameters
            self.parameters.append(held[own])
            watched.append((held, own, held[own]))
            if isinstance(held[own], AffineQuantizedTensor):  # an assignment to .data replaces all parts
                watched.append((held[own].__dict__, "_codes", held[own]._codes))
        for module in block.modules():
            if any(True for _ in module.children()) or "dropout" in type(module).__name__.lower():
                watched.append((module.__dict__, "training", False))
            if module is not block:
                watched.append((module.__dict__, "forward", None))
                hooks += [module._forward_hooks, module._forward_pre_hooks]
            children: Any = module._modules
            watched += [(children, key, child) for key, child in children.items()]
        path, choice = recipe.attention
        if choice:  # transformers' choice of the attention function
            config: Any = block.get_submodule(path).config  # a property would cost 1 µs
            watched.append((config.__dict__, CHOICE, config.__dict__.get(CHOICE)))
        self.dicts, self.keys, self.values = zip(*watched, strict=True)
        self.hooks = tuple(hooks)
        a = recipe.arguments
        self.roles = {a.hidden: "hidden", a.mask: "mask", a.rotary: "rotary", a.cache: "cache", a.bias: "bias"}
        if a.padding:
            self.roles |= {a.mask: "excluded", a.padding: "padding"}
        self.roles.pop("", None)
        self.roles |= dict.fromkeys(a.unused, "unused")
        self.combined = bool(a.bias or a.padding)  # several masks make one

    def _compiled(self, steps: Any) -> Runner:
        found = self.compile(steps)
        if isinstance(found, str):
            raise Refusal(found)
        return found

    def unchanged(self, block: nn.Module) -> bool:
        """Whether the block still consists of the same modules, parameters and modes."""
        return self.block() is block and all(map(is_, map(dict.get, self.dicts, self.keys), self.values))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the block for a call of its forward, or the reason (str) why it is not fused."""
        recipe = self.recipe
        a = recipe.arguments
        given = kwargs
        if args:
            if len(args) > len(a.names):
                return "it has more positional arguments than forward names"
            given = {**dict(zip(a.names, args, strict=False)), **kwargs}
        x = given.get(a.hidden)
        if type(x) is not Tensor or not x.is_cpu or not in_memory(x):
            return "the input is not in the memory of the CPU, or a mode, tracer or transform observes it"
        shape = x.shape
        if len(shape) != 3 or x.dtype is not recipe.dtype or shape[2] != recipe.widths[0] or 0 in shape:
            return f"the input is not a tensor [batch, tokens, {recipe.widths[0]}] of {recipe.dtype}"
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters)):
            return "gradients are enabled; call the model under torch.inference_mode() or torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        if (any(self.hooks) or any(_GLOBAL_HOOKS)) and self._hooked():
            return "a module in the block has a forward hook"
        batch, tokens = shape[:2] if a.batch_first else shape[1::-1]
        call, cache = Call(), None
        added: dict[str, Tensor] = {}
        for name, value in given.items():
            if value is None or value is False:
                continue
            role = self.roles.get(name)
            if role in ("hidden", "unused"):
                continue
            if role == "mask":
                if type(value) is not Tensor or value.ndim != 4 or not value.is_cpu:
                    return f"{name} is not a tensor [batch, heads, tokens, keys]"
                if not (a.selects if value.dtype is torch.bool else value.is_floating_point()):
                    return f"{name} is of {value.dtype}"
                call.mask = value
            elif role == "rotary":
                if not _is_pair(value, batch, tokens):
                    return f"{name} is not a pair of tensors [batch, tokens, channels]"
                call.cos, call.sin = value
            elif role == "cache":
                cache = value
            elif role is not None:
                if type(value) is not Tensor or not value.is_cpu:
                    return f"{name} is not a tensor in memory"
                added[role] = value
            elif not _same(a.constants, name, value):
                return f"argument {name} is not one of those of the recognized call"
        if a.rotary and call.cos is None:
            return "cos and sin are missing"
        if self.combined and (reason := self._add_masks(call, added, x, bool(given.get("is_causal")))):
            return reason
        if call.mask is not None and call.mask.shape[2] == 1 != tokens:
            call.mask = call.mask.expand(-1, -1, tokens, -1)
        y = self._attend(x if a.batch_first else x.transpose(0, 1).contiguous(), call, cache)
        if type(y) is str:
            return y
        if not a.batch_first:
            y = y.transpose(0, 1).contiguous()
        if recipe.output is None:
            return y
        return tuple(y if name == "" else None if name is None else given.get(name) for name in recipe.output)

    def _add_masks(self, call: Call, added: dict[str, Tensor], x: Tensor, hint: bool) -> str:
        """Make one mask of several; the reason if they have unexpected shapes or there is none. hint: is_causal."""
        if self.recipe.arguments.bias:
            bias, mask = added.get("bias"), call.mask
            if bias is None or bias.ndim != 4 or not bias.is_floating_point():
                return "the bias of the scores is missing or is not a float tensor [batch, heads, tokens, keys]"
            if mask is None:
                call.mask = bias
            elif mask.dtype is torch.bool:  # as transformers does, whose least number is that of the dtype of keys
                call.mask = torch.where(mask, bias, torch.finfo(x.dtype).min)
            else:
                call.mask = mask + bias
            call.causal = mask is None and self.recipe.causal and x.shape[1] > 1
            return ""
        tokens, batch = x.shape[:2] if not self.recipe.arguments.batch_first else x.shape[1::-1]
        excluded, padding = added.get("excluded"), added.get("padding")
        masks = []
        if hint and excluded is None:
            return "is_causal is given without a mask"
        if excluded is not None:
            if excluded.shape == (tokens, tokens):
                masks.append(excluded[None, None])
            elif excluded.shape == (batch * self.recipe.heads.query, tokens, tokens):
                masks.append(excluded.unflatten(0, (batch, self.recipe.heads.query)))
            else:
                return f"the mask has shape {list(excluded.shape)}"
        if padding is not None:
            if padding.shape != (batch, tokens):
                return f"the padding mask has shape {list(padding.shape)}"
            masks.append(padding[:, None, None])
        if not masks:
            return ""
        if all(m.dtype is torch.bool for m in masks):
            call.mask = ~(masks[0] | masks[1]) if len(masks) > 1 else ~masks[0]
            return ""
        floats = [zeros(m.shape).masked_fill(m, -torch.inf) if m.dtype is torch.bool else m for m in masks]
        if not all(m.is_floating_point() for m in floats):
            return "a mask is neither bool nor floating point"
        call.mask = sum(floats[1:], floats[0])
        return ""

    def _hooked(self) -> bool:
        """Whether a hook needs outputs of inner modules. transformers leaves hooks that are inactive in most calls."""
        library = sys.modules.get(_CAPTURING)
        if library is None or any(_GLOBAL_HOOKS):
            return True
        collector = library._active_collector.get()
        for hooks in self.hooks:
            for hook in hooks.values():
                if getattr(hook, "__module__", "") != _CAPTURING or getattr(hook, "__closure__", None) is None:
                    return True
                cells = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))
                if collector is not None and cells["key"].cell_contents in collector:
                    return True
        return False

    # -- keys and values -----------------------------------------------------------------------------------------------

    def _attend(self, x: Tensor, call: Call, cache: Any) -> Any:
        batch, tokens, _ = x.shape
        recipe = self.recipe
        heads, (_, shared, size) = recipe.heads.query, self.heads
        if cache is None or not recipe.cached:
            if call.mask is not None and (reason := _mask_refusal(call.mask, batch, heads, tokens, tokens)):
                return reason
            call.causal |= recipe.causal and call.mask is None
            if recipe.cached:
                shape = (batch, shared, tokens, size)
                call.keys, call.values = _empty(shape, x.dtype), _empty(shape, x.dtype)
                call.length = tokens
            return _ran(self.whole.run(x, call))
        cache = getattr(cache, "self_attention_cache", cache)
        layer = block_cache.layer_of(cache, recipe.layer)
        shape = (batch, shared, tokens, size)
        room = None if layer is None else block_cache.room(layer, shape, x.dtype)
        if room is None or (room.codes and tokens > 1 and call.mask is None):  # which tokens are seen then: see _limit
            return self._in_two_parts(x, call, cache, shape)
        if call.mask is not None and (
            reason := _mask_refusal(call.mask, batch, heads, tokens, room.codes + room.length)
        ):
            return reason
        call.keys, call.values = block_cache.take(layer, room)
        call.past, call.length, call.coded = room.past, room.length, room.coded
        if room.coded is None:
            self._limit(call, tokens)
        y = self.whole.run(x, call)
        if block_cache.quantizes(layer):
            layer.quantize_old()
        if y is None:  # run() has checked the input before the cache was changed
            raise RuntimeError(f"{recipe.name}: native code refused an input {list(x.shape)} of {x.dtype}")
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
            first, second = (self._compiled(part) for part in self.recipe.parts(self.steps))
            self.halves = first, second
        rows = x.shape[0] * x.shape[1]
        call.kept = {b: _empty((rows, width), torch.float32) for b, width in self.recipe.kept}
        call.keys, call.values = _empty(shape, x.dtype), _empty(shape, x.dtype)
        self.halves[0].run(x, call)
        keys, values = cache.update(call.keys, call.values, self.recipe.layer)
        call.keys, call.values = (t if t.stride(-1) == 1 else t.contiguous() for t in (keys, values))
        call.length = keys.shape[2]
        self._limit(call, shape[2])
        y = self.halves[1].run(x, call)
        assert y is not None
        return y


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _ran(y: Tensor | None) -> Tensor | str:
    return "native code refused the call" if y is None else y


def _same(constants: dict[str, Any], name: str, value: Any) -> bool:
    return name in constants and type(value) is type(constants[name]) and bool(value == constants[name])


def _is_pair(value: Any, batch: int, tokens: int) -> bool:
    if type(value) is not tuple or len(value) != 2:
        return False
    cos, sin = value
    if type(cos) is not Tensor or type(sin) is not Tensor or not (cos.is_cpu and sin.is_cpu):
        return False
    shape = cos.shape
    fits = len(shape) == 3 and shape[1] == tokens and shape[0] in (1, batch) and sin.shape == shape
    return fits and cos.is_floating_point() and sin.dtype is cos.dtype


def _mask_refusal(mask: Tensor, batch: int, heads: int, tokens: int, length: int) -> str:
    b, h, s, n = mask.shape
    fits = b in (1, batch) and h in (1, heads) and s == tokens and n == length
    return "" if fits else f"the mask has shape {[b, h, s, n]}, expected [{batch}, {heads} or 1, {tokens}, {length}]"
