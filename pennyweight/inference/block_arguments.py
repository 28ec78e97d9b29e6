"""Reads the arguments of a block's forward: the input, the tensors of the native call, and the cache."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..core.tracing import in_memory
from ..kernels.block import Call
from .block_description import BlockDescription
from .detect_changes import own_class
from .examples import zeros

_ROTATIONS = (torch.float32, torch.bfloat16, torch.float16)


class Read(NamedTuple):
    """What a call gives: the input, tensors of the native call, the cache, and for cross-attention the states of which
    keys and values are computed, and its mask."""

    x: Tensor
    call: Call
    cache: Any
    states: Tensor | None
    states_mask: Tensor | None


class Reader:
    """Reads calls of one block. A call that is not fused gives the reason."""

    def __init__(self, block: nn.Module, description: BlockDescription) -> None:
        self.description = description
        a = description.arguments
        named = dict(block.named_parameters())
        self.parameters = [p for p in map(named.get, description.parameters()) if p is not None]
        self.at = a.names.index(a.hidden) if a.hidden in a.names else len(a.names)  # of the input, if it has no name
        self.roles = {a.hidden: "hidden", a.mask: "mask", a.rotary: "rotary", a.cache: "cache", a.bias: "bias"}
        if a.padding:
            self.roles |= {a.mask: "excluded", a.padding: "padding"}
        self.roles |= {a.states: "states", a.states_mask: "states mask"}
        self.roles.pop("", None)
        self.roles |= dict.fromkeys(a.unused, "unused")
        self.forward = own_class(block).forward
        # the block was recognized with these values; an argument that is not given has its default
        defaults = {
            name: p.default
            for name, p in inspect.signature(self.forward).parameters.items()
            if p.default is not p.empty
        }
        self.effective = {**defaults, **a.constants}
        self.required = [name for name, value in a.constants.items() if not _same(value, defaults.get(name))]
        across = () if description.cross is None else (description.cross.keys, description.cross.values)
        layers: list[Any] = [block.get_submodule(path) for path in across]
        self.states_width = int(layers[0].in_features) if layers else 0
        for layer in layers:
            self.parameters += [p for p in layer._parameters.values() if p is not None]
        self.rotated = max((getattr(step, "rotated", 0) for step in description.steps), default=0)

    def reads_alike(self, other: Reader) -> bool:
        """Whether both read a call in the same way, if no gradients are enabled."""
        ours, theirs = self.description, other.description
        return self is other or (
            ours.arguments is theirs.arguments and ours.steps is theirs.steps and ours.dtype is theirs.dtype
            and ours.widths is theirs.widths and self.forward is other.forward
        )  # fmt: skip

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read | str:
        """The arguments, or the reason why the call is not fused."""
        description, a = self.description, self.description.arguments
        given = kwargs
        if args:
            given = {**dict(zip(a.names, args, strict=False)), **kwargs}
            if len(given) < len(args) + len(kwargs):
                return "it has too many positional arguments, or one that is also a keyword"
        x = given.get(a.hidden)
        grad = torch.is_grad_enabled()
        if type(x) is not Tensor or not in_memory(x) or not x.is_cpu or is_observed():
            return "the input is not in the memory of the CPU, or a mode, tracer or transform observes it"
        shape = x.shape
        if len(shape) != 3 or x.dtype is not description.dtype or shape[2] != description.widths[0] or 0 in shape:
            return f"the input is not a tensor [batch, tokens, {description.widths[0]}] of {description.dtype}"
        if grad and (x.requires_grad or any(p.requires_grad for p in self.parameters)):
            return "gradients are enabled; call the model under torch.inference_mode() or torch.no_grad()"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        batch, tokens = shape[:2] if a.batch_first else shape[1::-1]
        call, cache, states, states_mask = Call(), None, None, None
        added: dict[str, Tensor] = {}
        for name, value in given.items():
            role = self.roles.get(name)
            if role in ("hidden", "unused"):
                continue
            if value is None or value is False:
                if role is None and not _same(value, self.effective.get(name)):
                    return f"argument {name} is not one of those of the recognized call"
            elif role == "rotary":
                if reason := self._rotation(name, value, batch, tokens, grad):
                    return reason
                call.cos, call.sin = value
            elif role == "cache":
                cache = value
            elif role is None:
                if name not in self.effective or not _same(value, self.effective[name]):
                    return f"argument {name} is not one of those of the recognized call"
            elif not _readable(value, grad):
                return f"{name} is not a tensor in memory, or needs a gradient"
            elif role == "mask":
                if reason := _mask_reason(name, value, a.selects, x.dtype):
                    return reason
                call.mask = value
            elif role == "states mask":
                if reason := _mask_reason(name, value, a.states_selects, x.dtype):
                    return reason
                states_mask = value
            elif role == "states":
                if value.ndim != 3 or value.shape[0] != batch or value.shape[2] != self.states_width:
                    return f"{name} is not a tensor [{batch}, tokens, {self.states_width}]"
                if value.dtype is not x.dtype or 0 in value.shape:
                    return f"{name} is of {value.dtype} or empty"
                states = value
            else:
                added[role] = value
        for name in self.required:
            if name not in given:
                return f"argument {name} is missing"
        if a.states and states is None:
            return f"argument {a.states} is missing"
        if a.rotary and call.cos is None:
            return "cos and sin are missing"
        if (a.bias or a.padding) and (reason := self._add_masks(call, added, x, bool(given.get("is_causal")))):
            return reason
        if call.mask is not None and call.mask.shape[2] == 1 != tokens:
            call.mask = call.mask.expand(-1, -1, tokens, -1)
        return Read(x, call, cache, states, states_mask)

    def returned(self, y: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the block returns, with the hidden states y."""
        output = self.description.output
        if output is None:
            return y
        given = {**dict(zip(self.description.arguments.names, args, strict=False)), **kwargs}
        return tuple(y if name == "" else None if name is None else given.get(name) for name in output)

    def _rotation(self, name: str, value: Any, batch: int, tokens: int, grad: bool) -> str:
        """Why cos and sin cannot be read, or ""."""
        expected = f"{name} is not a pair of tensors [1 or {batch}, {tokens}, {self.rotated}] in memory"
        if type(value) is not tuple or len(value) != 2:
            return expected
        cos, sin = value
        if not (_readable(cos, grad) and _readable(sin, grad)) or cos.dtype not in _ROTATIONS:
            return expected
        shape = cos.shape
        fits = len(shape) == 3 and shape[0] in (1, batch) and shape[1] == tokens and shape[2] == self.rotated
        same = sin.shape == shape and sin.dtype is cos.dtype
        return "" if fits and same and cos.stride(2) == sin.stride(2) == 1 else expected

    def _add_masks(self, call: Call, added: dict[str, Tensor], x: Tensor, hint: bool) -> str:
        """Make one mask of several; the reason if they have unexpected shapes or there is none. hint: is_causal."""
        if self.description.arguments.bias:
            bias, mask = added.get("bias"), call.mask
            if bias is None or bias.ndim != 4 or not bias.is_floating_point():
                return "the bias of the scores is missing or is not a float tensor [batch, heads, tokens, keys]"
            if mask is None:
                call.mask = bias
            elif any(m != n and 1 not in (m, n) for m, n in zip(mask.shape, bias.shape, strict=True)):
                return f"a mask {list(mask.shape)} and a bias {list(bias.shape)} do not go together"
            elif mask.dtype is torch.bool:  # as transformers does, whose least number is that of the dtype of keys
                call.mask = torch.where(mask, bias, torch.finfo(x.dtype).min)
            else:
                call.mask = mask + bias
            call.causal = mask is None and self.description.causal and x.shape[1] > 1
            return "" if call.mask.dtype in _ROTATIONS else f"the bias of the scores is of {bias.dtype}"
        tokens, batch = x.shape[:2] if not self.description.arguments.batch_first else x.shape[1::-1]
        excluded, padding = added.get("excluded"), added.get("padding")
        masks = []
        if hint and excluded is None:
            return "is_causal is given without a mask"
        if excluded is not None:
            if excluded.shape == (tokens, tokens):
                masks.append(excluded[None, None])
            elif excluded.shape == (batch * self.description.heads.query, tokens, tokens):
                masks.append(excluded.unflatten(0, (batch, self.description.heads.query)))
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
        if not all(m.dtype in (torch.float32, x.dtype) for m in floats):
            return f"a mask is neither bool nor {x.dtype}"
        call.mask = sum(floats[1:], floats[0])
        return ""


def _mask_reason(name: str, mask: Tensor, selects: bool, dtype: torch.dtype) -> str:
    """Why a mask cannot be read, or ""."""
    if mask.ndim != 4:
        return f"{name} is not a tensor [batch, heads, tokens, keys]"
    fits = (selects and mask.dtype is torch.bool) or mask.dtype is torch.float32 or mask.dtype is dtype
    return "" if fits else f"{name} is of {mask.dtype}"


def _readable(t: Any, grad: bool) -> bool:
    """Whether t is a tensor whose memory can be read, and that gets no gradient; no transform is active."""
    return (
        type(t) in (Tensor, nn.Parameter) and t.is_cpu and t.layout is torch.strided
        and not (t.is_neg() or t.is_nested or (grad and t.requires_grad))
    )  # fmt: skip


def is_observed() -> bool:
    """Whether a TorchFunctionMode must see the operations of the block, or tensors may have tangents. The mode of
    torch.device only places new tensors."""
    if forward_ad._current_level >= 0:
        return True
    count = torch._C._len_torch_function_stack()
    return count > 0 and any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(count))


def _same(value: Any, other: Any) -> bool:
    """Whether two arguments mean the same. None and False, and an argument that is not given, all mean "off"."""
    if value is None or value is False:
        return other is None or other is False
    return type(value) is type(other) and bool(value == other)


def mask_refusal(mask: Tensor, batch: int, heads: int, tokens: int, length: int) -> str:
    b, h, s, n = mask.shape
    fits = b in (1, batch) and h in (1, heads) and s == tokens and n == length
    return "" if fits else f"the mask has shape {[b, h, s, n]}, expected [{batch}, {heads} or 1, {tokens}, {length}]"
