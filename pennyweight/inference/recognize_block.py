"""Derives the steps of a transformer block from its recorded operations.

Values are followed backward from the output to the products with quantized weights. What lies between two of them is
identified by computing it again with random values (query_graph.py, recognize_attention.py), so the result does not
depend on how the code is written. The caller verifies the steps with a run of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..kernels.block import AttentionStep, Columns, Heads, LinearStep, NormStep, RotaryStep
from ..support.errors import Refusal
from .block_description import CrossPart
from .query_graph import Rows, activation, between, height, is_move, leaves_of, title
from .recognize_attention import Attention, find_attention, heads_of
from .trace_block import Graph, Op, Value, replay

ADDS = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))
MULTIPLIES = frozenset(("mul", "__mul__", "__rmul__", "mul_", "__imul__"))


@dataclass(frozen=True)
class Acting:
    """act(product), or act of a half of the product's columns. act: None for the product itself."""

    product: Op
    act: str | None
    half: int | None


@dataclass(frozen=True)
class Cross:
    """Cross-attention: keys and values are computed from an argument, for all calls with the same argument once.

    part     as in the description of the block; the caller knows its layer
    states   name of the argument
    mask     the value that is added to the scores, or that selects keys
    selects  whether a bool mask selects keys
    """

    part: CrossPart
    states: str
    mask: Value | None
    selects: bool


@dataclass(frozen=True)
class Found:
    """The result: steps as in :class:`BlockDescription`, and the names of arguments."""

    steps: tuple[Any, ...]
    widths: tuple[int, ...]
    heads: Heads
    cut: int
    kept: tuple[tuple[int, int], ...]
    cached: bool
    cos_sin: tuple[str, str]
    causal: bool
    mask: Value | None
    selects: bool  # whether a bool mask selects keys
    cross: Cross | None


def recognize(graph: Graph, hidden: str, output: Value, cached: bool, batch_first: bool = True) -> Found:
    """The steps that compute ``output`` from the argument ``hidden`` [batch, tokens, width], or [tokens, batch, width].
    ``cached``: the block can be called with a cache of keys and values. Raises Refusal."""
    return _Recognizer(graph, graph.arguments[hidden], cached, batch_first).found(output)


class _Recognizer(Rows):
    def __init__(self, graph: Graph, x: Value, cached: bool, batch_first: bool) -> None:
        self.attention, self.cross = find_attention(graph, x)
        super().__init__(x, batch_first, {a.out for a in (self.attention, self.cross) if a is not None})
        self.graph, self.cached = graph, cached
        self.steps: list[Any] = []
        self.widths = [self.width, self.width]
        self.held: dict[Value, int] = {x: 0}
        self.crossed: Cross | None = None
        self.cos_sin = ("", "")
        self.heads = Heads(0, 0, 0)
        self.cut = 0
        self.terms = {
            self.origin(v)[0] for op in graph.ops if op.name in ADDS for v in op.inputs if len(op.inputs) == 2
        }

    def found(self, output: Value) -> Found:
        value = self.rows(output)
        self.emit(value, into=1)
        attention, cross = self.attention, self.crossed
        if any(out not in self.held for out in self.outs):
            raise Refusal("its output does not depend on its attention")
        if cross is not None:
            if self.cut >= cross.part.cut:
                raise Refusal("cross-attention comes before attention")
            cross = replace(cross, part=replace(cross.part, kept=self._kept(cross.part.cut)))
        return Found(
            tuple(self.steps), tuple(self.widths), self.heads, self.cut, self._kept(self.cut), self.cached,
            self.cos_sin, attention is not None and attention.causal, None if attention is None else attention.mask,
            attention is not None and not attention.transposed, cross,
        )  # fmt: skip

    def _kept(self, cut: int) -> tuple[tuple[int, int], ...]:
        """Buffers that are written before the cut and read after it."""
        written = {b for s in self.steps[:cut] for b in _written(s)}
        later = {b for s in self.steps[cut:] for b in _read(s)}
        return tuple((b, self.widths[b]) for b in sorted(written & later) if b > 1)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def buffer(self, width: int) -> int:
        self.widths.append(width)
        return len(self.widths) - 1

    def emit(self, value: Value, into: int | None = None) -> int:
        """The buffer with the rows of a value; adds the steps that compute it."""
        if value in self.held and into is None:
            return self.held[value]
        op = value.op
        if op is None:
            raise Refusal(f"{value.name or 'a constant'} is used as hidden states")
        out = into
        if self.attention is not None and value is self.attention.out:
            out = self._attend(self.attention)
        elif self.cross is not None and value is self.cross.out:
            out = self._attend_across(self.cross)
        elif op.name in ADDS and len(op.inputs) == 2:
            out = self._sum(value, into)
        elif op.product is not None:
            out = self._product([op], into=into)[0]
        elif self.norm(op) is not None:
            source = self.emit(self.origin(op.inputs[0])[0])
            out = self.buffer(self.width) if into is None else into
            self.steps.append(NormStep(source, out, self.form(op, self.width)))
        elif (acting := self._acting(value)) is not None and acting.half is None:
            out = self._product([acting.product], act=acting.act)[0]
        elif op.name in MULTIPLIES and len(op.inputs) == 2:
            out = self._gated(op)
        else:
            raise Refusal(f"the operation {title(op)} has no step")
        if into is not None and out != into:
            raise Refusal(f"its output is that of {title(op)}, not a sum, a norm or a linear layer")
        self.held[value] = out
        return out

    def _sum(self, value: Value, into: int | None) -> int:
        terms = list(self._terms(value))
        products = [t for t in terms if t not in self.held and t.op is not None and t.op.product is not None]
        inputs = {t: self._input(t.op) for t in products}  # first: a norm in it may also be a term
        rest = [t for t in terms if t not in products]
        rest.sort(key=lambda t: t not in self.held)  # stable: those that exist come first
        branches = rest[1:]
        before = self.emit(rest[0]) if rest else None
        total = len(products) + len(branches)
        for term in branches:
            total -= 1
            op = term.op
            if term in self.held or op is None or self.norm(op) is None:
                what = term.name or "a constant" if op is None else f"the output of {title(op)}"
                raise Refusal(f"a sum with {what} has no step")
            source = self.emit(self.origin(op.inputs[0])[0])
            out = into if into is not None and total == 0 else self.buffer(self.width)
            self.steps.append(NormStep(source, out, self.form(op, self.width), before))
            before = out
        for term in products:
            total -= 1
            out = into if into is not None and total == 0 else self.buffer(self.width)
            (before,) = self._product([term.op], into=out, residual=before, source=inputs[term])
        assert before is not None
        return before

    def uses(self, value: Value) -> int:
        """The number of operations that use a value or a view or copy of it."""
        total = 0
        for op in self.graph.ops:
            if value in op.inputs:
                moved = len(op.inputs) == 1 and all(is_move(op, out) for out in op.outs)
                total += sum(map(self.uses, op.outs)) if moved else 1
        return total

    def _terms(self, value: Value, outer: bool = True) -> Iterator[Value]:
        """The addends of nested sums."""
        op = value.op
        inner = value not in self.held and op is not None and op.name in ADDS and len(op.inputs) == 2
        if not inner or (not outer and self.uses(value) > 1):  # a sum that is also used elsewhere has its own buffer
            yield value
            return
        assert op is not None
        if op.kwargs.get("alpha", 1) != 1 or any(v.shape != value.shape for v in op.inputs):
            raise Refusal("a sum with a factor or with broadcasting has no step")
        for part in op.args[:2]:
            yield from self._terms(self.rows(part), outer=False)

    def _input(self, op: Any) -> tuple[int, Any, int | None]:
        """(buffer, norm, buffer that keeps the normalized rows) for the input of a product."""
        value = self._input_value(op)
        if value in self.held:
            return self.held[value], None, None
        made = value.op
        if made is not None and self.norm(made) is not None and made.product is None:
            source = self.emit(self.origin(made.inputs[0])[0])
            form = self.form(made, self.width)
            if value not in self.terms:
                return source, form, None
            self.held[value] = normed = self.buffer(self.width)
            return source, form, normed
        return self.emit(value), None, None

    def _input_value(self, op: Op) -> Value:
        """The rows that a product multiplies, in any order: that of its output follows."""
        return self.origin(op.inputs[0])[0]

    def _product(
        self, ops: list[Any], into: int | None = None, residual: int | None = None, act: Any = None,
        gated: bool = False, source: tuple[int, Any, int | None] | None = None,
    ) -> list[int]:  # fmt: skip
        """Adds one LinearStep for products with the same input; returns their buffers."""
        x, norm, normed = self._input(ops[0]) if source is None else source
        heights = [height(op) for op in ops]
        if gated:
            heights = [heights[0] if len(ops) == 2 else heights[0] // 2]
        out = [self.buffer(n) if into is None else into for n in heights]
        layers: Any = tuple(op.product for op in ops)
        self.steps.append(LinearStep(x, layers, tuple(out), norm, normed, act, gated, residual))
        return out

    def _gated(self, op: Op) -> int:
        """act(gate) * up, with gate and up two products with the same input, or the halves of one."""
        for first, second in (op.inputs, op.inputs[::-1]):
            gate, up = self._acting(first), self._acting(second)
            if gate is None or up is None or gate.act is None or up.act is not None:
                continue
            if gate.half is None and up.half is None and self._same_input(gate.product, up.product):
                return self._product([gate.product, up.product], act=gate.act, gated=True)[0]
            if gate.product is up.product and (gate.half, up.half) == (0, 1):
                return self._product([gate.product], act=gate.act, gated=True)[0]
        raise Refusal("a product of two values is not that of an activation and a linear layer")

    def _same_input(self, first: Op, second: Op) -> bool:
        return self._input_value(first) is self._input_value(second)

    def _acting(self, value: Value) -> Acting | None:
        """How a value is computed from a product, if by an activation of its elements, or of half of its columns."""
        products = [op for op in between(value) if op.product is not None]
        if len(products) != 1:
            return None
        (made,) = products[0].outs
        probe = self.random(made.shape) * 3
        try:
            y = replay(value, {made: probe})
        except Refusal:
            return None
        for half, x in ((None, probe), *enumerate(probe.chunk(2, -1))):
            if y.numel() == x.numel() and y.shape[-1] == x.shape[-1]:
                x = x.reshape(y.shape)
                act = activation(x, y)
                if act is not None or torch.equal(x, y):
                    return Acting(products[0], act, half)
        return None

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attend(self, found: Attention) -> int:
        count, size = found.q.shape[1], found.q.shape[3]
        if found.v.shape[-1] != size or found.q.shape[:3:2] != (self.batch, self.tokens):
            raise Refusal("keys and values have different sizes, or tokens are not those of the hidden states")
        q = heads_of(self, found.q, count, size)
        k = heads_of(self, found.k, found.k.shape[1], size, transposed=found.transposed)
        v = heads_of(self, found.v, found.v.shape[1], size)
        if v.norm is not None or v.rotary is not None or v.factor != 1 or k.count != v.count:
            raise Refusal("values are normalized, rotated or scaled before attention")
        if (q.rotary, q.rotated, q.cos_sin) != (k.rotary, k.rotated, k.cos_sin):
            raise Refusal("queries and keys are rotated differently")
        self.cos_sin = q.cos_sin
        products = list(dict.fromkeys((q.product, k.product, v.product)))
        if len({self._input_value(op) for op in products}) > 1:
            raise Refusal("queries, keys and values are computed from different inputs")
        out = dict(zip(products, self._product(products), strict=True))
        at = [Columns(out[h.product], h.start) for h in (q, k, v)]
        self.heads = heads = Heads(count, k.count, size)
        scale = found.scale * q.factor * k.factor
        result = self.buffer(count * size)
        self.cached = self.cached or q.rotary is not None or q.norm is not None or k.norm is not None
        if self.cached:
            rotary: Any = q.rotary, q.rotated, q.norm, k.norm
            self.steps.append(RotaryStep(at[0], at[1], at[2], heads, *rotary))
            self.cut = len(self.steps)
            self.steps.append(AttentionStep(at[0], result, heads, scale, softcap=found.softcap))
        else:
            self.cut = len(self.steps)
            self.steps.append(AttentionStep(at[0], result, heads, scale, at[1], at[2], found.softcap))
        return result

    def _attend_across(self, found: Attention) -> int:
        count, size = found.q.shape[1], found.q.shape[3]
        length = found.v.shape[2]
        states = [v for v in leaves_of(found.k) | leaves_of(found.v) if v.tensor.is_floating_point()]
        if found.v.shape[-1] != size or found.q.shape[:3:2] != (self.batch, self.tokens) or len(states) != 1:
            raise Refusal("keys and values of cross-attention are not computed from one argument")
        q = heads_of(self, found.q, count, size)
        k = heads_of(self, found.k, found.k.shape[1], size, found.transposed, length)
        v = heads_of(self, found.v, found.v.shape[1], size, False, length)
        plain = all(h.norm is None and h.rotary is None for h in (q, k, v)) and v.factor == 1 and k.count == v.count
        whole = all(h.start == 0 and height(h.product) == h.count * size and h.product.path for h in (k, v))
        if not (plain and whole) or found.causal or any(h.product.inputs != states for h in (k, v)):
            raise Refusal("keys and values of cross-attention are not the outputs of linear layers")
        (buffer,) = self._product([q.product])
        heads, result = Heads(count, k.count, size), self.buffer(count * size)
        part = CrossPart(len(self.steps), (), k.product.path, v.product.path, heads)
        self.crossed = Cross(part, states[0].name, found.mask, not found.transposed)
        scale = found.scale * q.factor * k.factor
        self.steps.append(AttentionStep(Columns(buffer, q.start), result, heads, scale, softcap=found.softcap))
        return result


def _written(step: Any) -> set[int]:
    if isinstance(step, LinearStep):
        return {*step.out} | ({step.normed} if step.normed is not None else set())
    return {step.q.buffer} if isinstance(step, RotaryStep) else {step.out}


def _read(step: Any) -> set[int]:
    if isinstance(step, RotaryStep):
        return {step.q.buffer, step.k.buffer, step.v.buffer}
    if isinstance(step, AttentionStep):
        return {c.buffer for c in (step.q, step.k, step.v) if c is not None}
    return {step.x} | ({step.residual} if step.residual is not None else set())
