"""Native steps of transformer blocks; see kernels/block.py for the steps and arguments.py for the rules.

What is the same in all calls is checked once, when the block is compiled. Each call checks the input, the tensors of
the :class:`~pennyweight.kernels.block.Call`, and that no parameter changed its size, dtype or device. A
:class:`NativeStack` runs several blocks in one native call, each on the output of the one before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core.tracing import is_observed
from ...support.errors import ArgumentError, Refusal
from ..block import AttentionStep, Call, Past, RotaryStep, Steps
from ..block_plan import Plan, Structures, indices, plan, structures
from ..cpu.abi import U8, Block, CacheCodes
from ..cpu.library import usable
from .arguments import CPU, FLOAT_KINDS, PLAIN, address, check_status, native_function
from .attention import cache_codes, past_reason

_SIZE, _KIND = attrgetter("nbytes"), attrgetter("dtype", "is_cpu")
_SHARED = Block.cos.offset  # from here on blocks that run in turn may have the same
_MASK_KINDS = {torch.bool: U8, **FLOAT_KINDS}


def compile_steps(steps: Steps) -> NativeBlock | str:
    """The native form of a block, or the reason why the native library cannot run it.

    Raises ArgumentError if sizes of the steps do not fit each other.
    """
    verdict = usable()
    if verdict is not True:
        return str(verdict)
    try:
        return NativeBlock(plan(steps))
    except Refusal as reason:
        return str(reason)


class _Ready:
    """Structures with the addresses of the parameters, for one call at a time. first: those that were made when the
    block was compiled, with which later parameters are compared."""

    def __init__(self, plan: Plan, first: _Ready | None = None) -> None:
        s: Structures = structures(plan)
        self.block, self.buffers, self.address, self.zeros = s.block, s.buffers, s.address, s.zeros
        self.alone = (ctypes.c_void_p * 1)(s.address)  # for a call of this block alone
        self.kept = s.kept
        self.input, self.output = s.buffers[0], s.buffers[1]
        parts = [*s.parts, *s.numbers]
        self.parameters = [p for p, _, _ in parts]
        self.fields = [(to, name) for _, to, name in parts]
        self.numbers = [p for p, _, _ in s.numbers]
        self.sizes: list[int] = list(map(_SIZE, self.parameters)) if first is None else first.sizes
        # in memory of the CPU
        self.kinds: list[Any] = [(p.dtype, True) for p in self.numbers] if first is None else first.kinds
        self.addresses: list[int] = []
        self.coded: tuple[CacheCodes, ...] | None = None

    def renew(self) -> None:
        """Enter the addresses of the parameters. Raises ArgumentError if one of them changed."""
        if (
            list(map(_SIZE, self.parameters)) != self.sizes or list(map(_KIND, self.numbers)) != self.kinds
            or not all(map(Tensor.is_contiguous, self.numbers))
        ):  # fmt: skip
            raise ArgumentError(
                "block: a parameter was resized, converted or moved after the block was compiled; compile it again"
            )
        addresses = [p.data_ptr() for p in self.parameters]
        if addresses != self.addresses:
            for (to, name), at in zip(self.fields, addresses, strict=True):
                setattr(to, name, at)
            self.addresses = addresses
        for zero, shift, to in self.zeros:
            to.act_zero_point = int(zero) - shift


class NativeBlock:
    """A block that the native library runs. Several Python threads may call it at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._call = native_function("pw_blocks")
        self._dtype, self._widths = plan.steps.dtype, plan.steps.widths
        self._reads = plan.rotary is not None or plan.attention is not None
        self._writes = any(1 in indices(step)[1] for step in plan.steps.steps)
        self._ready = [_Ready(plan)]  # not in use by a call
        self._first = self._ready[0]

    def converted(self) -> bool:
        """Whether a parameter was converted to another dtype or moved, so that the block must be compiled again."""
        first = self._first
        return list(map(_KIND, first.numbers)) != first.kinds

    def run(self, x: Tensor, call: Call) -> Tensor | None:
        """The output [batch, tokens, width] for x [batch, tokens, width]; see :func:`block.run_reference`.

        None if the native library cannot read x: another dtype or device, a gradient is wanted, or a mode, tracer or
        transform must see the call. Parameters get no gradient. Raises ArgumentError if the shape of x, a tensor of
        the call or a parameter does not fit, and MemoryError.
        """
        if not _readable(x, self._dtype):
            return None
        x = _input(x, self._widths[0])
        shape = x.shape
        batch, tokens, width = shape[0], shape[1], self._widths[1]
        y = torch.empty_strided((batch, tokens, width), (tokens * width, width, 1), dtype=self._dtype, device=CPU)
        try:
            ready = self._ready.pop()
        except IndexError:  # all are in use by other Python threads
            ready = _Ready(self.plan, self._first)
        kept: dict[int, Tensor] = call.kept
        try:
            ready.renew()
            ready.input.data, ready.output.data = x.data_ptr(), y.data_ptr()
            block: Any = ready.block
            block.batch, block.tokens, block.threads = batch, tokens, torch.get_num_threads()
            if self._reads:
                self._enter(ready, call, batch, tokens)
            if kept or self.plan.given:
                self._keep(ready, kept, batch * tokens)
            status = self._call(ready.alone, 1)
        finally:
            for i in kept:
                if 1 < i < len(self._widths):
                    ready.buffers[i].data = None
            self._ready.append(ready)
        if status:
            check_status(status, f"block: input {list(shape)}")
        return y if self._writes else x

    def _enter(self, ready: _Ready, call: Call, batch: int, tokens: int) -> None:
        """Enter what rotary steps and attention steps read. Raises ArgumentError if it does not fit."""
        block, rotary, attention, cached = ready.block, self.plan.rotary, self.plan.attention, self.plan.cached
        past, length, window = call.past, call.length, call.window
        if past < 0 or length < 0 or window < 0:
            raise ArgumentError(f"block: past {past}, length {length} and window {window} must not be negative")
        block.past, block.length, block.window, block.causal = past, length, window, call.causal
        ready.coded = None if call.coded is None else self._codes(call.coded, call.keys, cached)
        coded = 0
        if ready.coded is not None:
            coded = call.coded.keys.shape[2]  # type: ignore[union-attr]
            block.past_keys, block.past_values = map(ctypes.addressof, ready.coded)
        block.coded = coded
        reader = rotary or cached
        if reader is not None:
            keys, values, heads = call.keys, call.values, reader.heads
            end = max(past + tokens if rotary else 0, length if cached else 0)
            if keys is None or values is None:
                raise ArgumentError(f"block: the call has no keys and values; expected [{batch}, {heads.shared}, ..]")
            shape = keys.shape
            if (
                values.shape != shape or len(shape) != 4 or shape[0] != batch or shape[1] != heads.shared
                or shape[2] < end or shape[3] != heads.size or values.dtype is not keys.dtype
            ):  # fmt: skip
                raise ArgumentError(
                    f"block: expected keys and values [{batch}, {heads.shared}, {end} or more, {heads.size}] of one "
                    f"dtype, got {list(shape)} {keys.dtype} and {list(values.shape)} {values.dtype}"
                )
            block.keys, strides = _strided(keys, "keys", FLOAT_KINDS)
            block.key_strides = strides[:3]
            block.values, strides = _strided(values, "values", FLOAT_KINDS)
            block.value_strides = strides[:3]
            block.cache_kind = FLOAT_KINDS[keys.dtype]
        if rotary is not None and rotary.rotary is not None:
            cos, sin = call.cos, call.sin
            if cos is None or sin is None or cos.shape != sin.shape or cos.dtype is not sin.dtype:
                raise ArgumentError("block: the call needs cos and sin of one shape and dtype")
            shape = cos.shape
            if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] != tokens or shape[2] != rotary.rotated:
                raise ArgumentError(
                    f"block: expected cos and sin [1 or {batch}, {tokens}, {rotary.rotated}], got {list(shape)}"
                )
            one = shape[0] == 1
            block.cos, strides = _strided(cos, "cos", FLOAT_KINDS)
            block.cos_strides = (0 if one else strides[0], strides[1])
            block.sin, strides = _strided(sin, "sin", FLOAT_KINDS)
            block.sin_strides = (0 if one else strides[0], strides[1])
            block.angle_kind = FLOAT_KINDS[cos.dtype]
        mask = None if attention is None else call.mask
        if mask is None or attention is None:
            block.mask = None
            return
        shape, least = mask.shape, coded + length if cached else tokens
        if (
            len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, attention.heads.query)
            or shape[2] not in (1, tokens) or shape[3] < least
        ):  # fmt: skip
            raise ArgumentError(
                f"block: expected a mask [1 or {batch}, 1 or {attention.heads.query}, 1 or {tokens}, {least} or more], "
                f"got {list(shape)}"
            )
        block.mask, strides = _strided(mask, "mask", _MASK_KINDS, channels=False)
        block.mask_strides = tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))
        block.mask_kind = _MASK_KINDS[mask.dtype]

    @staticmethod
    def _codes(coded: Past, keys: Tensor | None, cached: AttentionStep | None) -> tuple[CacheCodes, ...]:
        """The structures of quantized keys and values, which must live during the call."""
        fits = "no step reads them" if keys is None or cached is None else past_reason(coded, keys)
        if fits is not True:
            raise ArgumentError(f"block: quantized keys and values: {fits}")
        return cache_codes(coded)

    def _keep(self, ready: _Ready, kept: dict[int, Tensor], rows: int) -> None:
        if missing := self.plan.given - kept.keys():
            raise ArgumentError(f"block: buffers {sorted(missing)} are read before they are written; keep them")
        for i, t in kept.items():
            if not 1 < i < len(self._widths):
                raise ArgumentError(f"block: cannot keep buffer {i}; scratch buffers are 2 to {len(self._widths) - 1}")
            what = f"block: kept buffer {i}"
            ready.buffers[i].data = address(t, what, (torch.float32,), rows * self._widths[i], exact=True)


class _ReadyStack:
    """Structures of several blocks with the addresses of their parameters, for one call at a time."""

    def __init__(self, blocks: Sequence[NativeBlock]) -> None:
        self.each = [_Ready(b.plan, b._first) for b in blocks]
        self.addresses: list[int] = []
        self.parameters = [p for ready in self.each for p in ready.parameters]
        self.sizes = list(chain.from_iterable(ready.sizes for ready in self.each))
        self.numbers = [p for ready in self.each for p in ready.numbers]
        self.kinds = list(chain.from_iterable(ready.kinds for ready in self.each))
        self.zeros = [ready for ready in self.each if ready.zeros]
        self.list = (ctypes.c_void_p * len(self.each))(*(ready.address for ready in self.each))

    def renew(self) -> None:
        """As :meth:`_Ready.renew`, of all blocks at once."""
        if (
            [p.data_ptr() for p in self.parameters] == self.addresses
            and list(map(_SIZE, self.parameters)) == self.sizes and list(map(_KIND, self.numbers)) == self.kinds
            and all(map(Tensor.is_contiguous, self.numbers))
        ):  # fmt: skip
            for ready in self.zeros:
                ready.renew()
            return
        for ready in self.each:
            ready.renew()
        self.addresses = list(chain.from_iterable(ready.addresses for ready in self.each))


class NativeStack:
    """Blocks of one width that run in one native call, each on the output of the one before it. Several Python threads
    may call it at once."""

    def __init__(self, blocks: Sequence[NativeBlock]) -> None:
        """Raises Refusal if they do not fit each other."""
        first = blocks[0]
        self.blocks = tuple(blocks)
        self._width, self._dtype = first._widths[0], first._dtype
        if any({*b._widths[:2]} != {self._width} or b._dtype is not self._dtype or b.plan.given for b in blocks):
            raise Refusal("needs blocks of one width and dtype, of which none is a part of one")
        codes = [operand.codes.data_ptr() for b in blocks for operand in b.plan.operands()]
        if len({*codes}) < len(codes):  # a caller may write other weights to them between the blocks
            raise Refusal("needs blocks that share no weights")
        self._sizes = [tuple(map(_sizes, (b.plan.rotary, b.plan.attention, b.plan.cached))) for b in blocks]
        self._ready: list[_ReadyStack] = []

    def take(self) -> _ReadyStack:
        """Structures for a call, to be handed back after it. Raises ArgumentError if a parameter changed."""
        try:
            ready = self._ready.pop()
        except IndexError:  # none, or all are in use by other Python threads
            ready = _ReadyStack(self.blocks)
        ready.renew()
        return ready

    def give_back(self, ready: _ReadyStack) -> None:
        self._ready.append(ready)

    def run(
        self, ready: _ReadyStack, x: Tensor, calls: Sequence[Call], like: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """The outputs of the first len(calls) blocks: [blocks - 1, batch, tokens, width] and, of the last one, [batch,
        tokens, width]. calls[i] equals calls[like[i]] but for keys and values.

        None if the native library cannot read x. Raises ArgumentError and MemoryError as :meth:`NativeBlock.run`.
        """
        if not _readable(x, self._dtype):
            return None
        x = _input(x, self._width)
        batch, tokens, width = x.shape
        between = torch.empty((len(calls) - 1, batch, tokens, width), dtype=self._dtype, device=CPU)
        y = torch.empty((batch, tokens, width), dtype=self._dtype, device=CPU)
        size, threads = x.nbytes, torch.get_num_threads()
        inputs = [x.data_ptr(), *range(between.data_ptr(), between.data_ptr() + between.nbytes, size or 1)]
        for i, (one, call) in enumerate(zip(ready.each, calls, strict=False)):
            block: Any = one.block
            one.input.data, one.output.data = inputs[i], inputs[i + 1] if i + 1 < len(inputs) else y.data_ptr()
            if like[i] == i or not self._enter_as(i, like[i], one, ready.each[like[i]], call, calls[like[i]]):
                block.batch, block.tokens, block.threads = batch, tokens, threads
                if self.blocks[i]._reads:
                    self.blocks[i]._enter(one, call, batch, tokens)
        if status := self.blocks[0]._call(ready.list, len(calls)):
            check_status(status, f"{len(calls)} blocks: input {list(x.shape)}")
        return between, y

    def _enter_as(self, i: int, j: int, ready: _Ready, before: _Ready, call: Call, other: Call) -> bool:
        """Enter what call j has, but for keys and values; False if these are not alike."""
        if self._sizes[i] != self._sizes[j] or call.coded is not None:
            return False
        for new, old in ((call.keys, other.keys), (call.values, other.values)):
            if new is None and old is None:
                continue
            if new is None or old is None or (
                type(new) is not Tensor or new.shape != old.shape or new.dtype is not old.dtype or new.is_neg()
                or new.stride() != old.stride() or not new.is_cpu or new.layout is not torch.strided
            ):  # fmt: skip
                return False
        block: Any = ready.block
        ctypes.memmove(ready.address + _SHARED, before.address + _SHARED, ctypes.sizeof(Block) - _SHARED)
        if call.keys is not None and call.values is not None:
            block.keys, block.values = call.keys.data_ptr(), call.values.data_ptr()
        ready.coded = None
        return True


def _sizes(step: RotaryStep | AttentionStep | None) -> tuple[Any, ...]:
    """Of a step: what a call is checked against."""
    if step is None:
        return ()
    heads = step.heads.query, step.heads.shared, step.heads.size
    return (*heads, step.rotary, step.rotated) if isinstance(step, RotaryStep) else heads


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether native code may read x."""
    return not (  # hot path, runs per block and call
        type(x) not in PLAIN or not x.is_cpu or x.dtype is not dtype or x.is_neg()
        or x.layout is not torch.strided or (x.requires_grad and torch.is_grad_enabled())
        or (
            (torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
             or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)
            and is_observed(x)
        )
    )  # fmt: skip


def _input(x: Tensor, width: int) -> Tensor:
    """x [batch, tokens, width], contiguous. Raises ArgumentError."""
    shape = x.shape
    if len(shape) != 3 or shape[2] != width:
        raise ArgumentError(f"block: expected an input [batch, tokens, {width}], got {list(shape)}")
    return x if x.is_contiguous() else x.contiguous()


def _strided(
    t: Tensor, name: str, kinds: dict[torch.dtype, int], *, channels: bool = True
) -> tuple[int, tuple[int, ...]]:
    """Address and strides of a tensor of the call. channels: the last dimension must be contiguous."""
    if type(t) in PLAIN and t.is_cpu and t.layout is torch.strided and t.dtype in kinds and not t.is_neg():
        strides = t.stride()
        if not channels or strides[-1] == 1 or t.shape[-1] <= 1:
            return t.data_ptr(), strides
        raise ArgumentError(f"block: {name} {list(t.shape)} need contiguous channels, the strides are {list(strides)}")
    return address(t, f"block: {name}", tuple(kinds), 0, contiguous=False), t.stride()  # raises
