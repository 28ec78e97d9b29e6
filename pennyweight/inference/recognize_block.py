"""Derives the steps of a transformer block from its recorded operations.

Values are followed backward from the output to the products with quantized weights. What lies between two of them is
identified by computing it again with random values (identify.py, :func:`_heads_of`), so the result does not depend on
how the code is written. The caller verifies the steps with a run of the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..kernels.block import AttentionStep, Columns, Heads, LinearStep, Norm, NormStep, RotaryStep, normalize, rotate
from .identify import NormForm, activation, close, norm_form
from .random_values import Random, zeros
from .recipe import Product
from .trace_block import Graph, Op, Refusal, Value, replay

ADDS = frozenset(("add", "__add__", "__radd__", "add_", "__iadd__"))
MULTIPLIES = frozenset(("mul", "__mul__", "__rmul__", "mul_", "__imul__"))


@dataclass(eq=False)
class Attention:
    """softmax(q @ k.T * scale + mask) @ v. q, k, v, out: [batch, heads, tokens, channels]; k is transposed if
    ``transposed``. mask: the value that is added, or that selects keys."""

    q: Value
    k: Value
    v: Value
    out: Value
    mask: Value | None
    scale: float
    softcap: float = 0.0
    causal: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class HeadsOf:
    """Heads computed from columns of a product: norm and rotation of each head, times a factor."""

    product: Op
    start: int
    count: int
    norm: NormForm | None
    rotary: str | None
    rotated: int
    cos_sin: tuple[str, str]
    factor: float


@dataclass(frozen=True)
class Acting:
    """act(product), or act of a half of the product's columns. act: None for the product itself."""

    product: Op
    act: str | None
    half: int | None


@dataclass(frozen=True)
class Cross:
    """Cross-attention: keys and values are computed from an argument, for all calls with the same argument once.

    cut            index of its AttentionStep
    kept           (buffer, width) of the buffers that steps before and after the cut use
    states         name of the argument
    keys, values   paths of the linear layers that compute them, [batch, tokens, shared * size]
    mask           the value that is added to the scores, or that selects keys
    selects        whether a bool mask selects keys
    """

    cut: int
    kept: tuple[tuple[int, int], ...]
    states: str
    keys: str
    values: str
    heads: Heads
    mask: Value | None
    selects: bool


@dataclass(frozen=True)
class Found:
    """The result: steps as in :class:`Recipe`, and the names of arguments."""

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


class _Recognizer:
    def __init__(self, graph: Graph, x: Value, cached: bool, batch_first: bool) -> None:
        self.graph, self.x, self.cached = graph, x, cached
        (self.batch, self.tokens), self.width = x.shape[:2] if batch_first else x.shape[1::-1], x.shape[2]
        self.steps: list[Any] = []
        self.widths = [self.width, self.width]
        self.held: dict[Value, int] = {x: 0}
        self.swapped: dict[Value, bool] = {x: not batch_first}  # whether rows are in the order (token, batch)
        self.origins: dict[Value, tuple[Value, bool]] = {}
        self.norms: dict[Op, NormForm | None] = {}
        self.attention, self.cross = self._find_attention()
        self.outs = {a.out for a in (self.attention, self.cross) if a is not None}
        self.crossed: Cross | None = None
        self.cos_sin = ("", "")
        self.heads = Heads(0, 0, 0)
        self.cut = 0
        self.random = Random(0).normal
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
            if self.cut >= cross.cut:
                raise Refusal("cross-attention comes before attention")
            cross = replace(cross, kept=self._kept(cross.cut))
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

    # -- rows ----------------------------------------------------------------------------------------------------------

    def origin(self, value: Value) -> tuple[Value, bool]:
        """(The value of which this is a view or copy, whether (batch, token) and (token, batch) are exchanged)."""
        if value not in self.origins:
            self.origins[value] = self._origin(value)
        return self.origins[value]

    def _origin(self, value: Value) -> tuple[Value, bool]:
        chain = list(_moves_up(value))
        for source in reversed(chain):
            if source is value:
                break
            probe = self.random(source.shape)
            moved = replay(value, {source: probe})
            if moved.numel() != probe.numel():
                continue
            if source in self.outs:  # merged heads are rows
                probe = probe.transpose(1, 2).flatten(2)
            if torch.equal(moved.flatten(), probe.flatten()):
                return source, False
            pairs = (self.batch, self.tokens), (self.tokens, self.batch)
            for first, second in pairs if probe.numel() % (self.batch * self.tokens) == 0 else ():
                other = probe.reshape(first, second, -1).transpose(0, 1)
                if torch.equal(moved.flatten(), other.flatten()):
                    return source, True
        return value, False

    def rows(self, value: Value) -> Value:
        """The value of which this is a view or copy, with its rows in the order of the input."""
        source, exchanged = self.origin(value)
        if (exchanged != self.order(source)) != self.order(self.x):
            raise Refusal("rows are exchanged in an unsupported way")
        return source

    def order(self, source: Value) -> bool:
        """Whether the rows of a value are in the order (token, batch)."""
        if source not in self.swapped:
            self.swapped[source] = False
            op = source.op
            if op is not None and op.inputs and source not in self.outs:
                origin, exchanged = self.origin(op.inputs[0])
                if source.shape.numel() % (self.batch * self.tokens) == 0:
                    self.swapped[source] = self.order(origin) != exchanged
        return self.swapped[source]

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
            self.steps.append(NormStep(source, out, self._form(op, self.width)))
        elif (acting := self._acting(value)) is not None and acting.half is None:
            out = self._product([acting.product], act=acting.act)[0]
        elif op.name in MULTIPLIES and len(op.inputs) == 2:
            out = self._gated(op)
        else:
            raise Refusal(f"the operation {_title(op)} has no step")
        if into is not None and out != into:
            raise Refusal(f"its output is that of {_title(op)}, not a sum, a norm or a linear layer")
        self.held[value] = out
        return out

    def norm(self, op: Op) -> NormForm | None:
        if op not in self.norms:
            self.norms[op] = norm_form(op)
        return self.norms[op]

    def _form(self, op: Op, width: int) -> Any:
        form = self.norm(op)
        assert form is not None
        if form.width != width:
            raise Refusal(f"{op.path} normalizes {form.width} channels instead of {width}")
        return form

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
                what = term.name or "a constant" if op is None else f"the output of {_title(op)}"
                raise Refusal(f"a sum with {what} has no step")
            source = self.emit(self.origin(op.inputs[0])[0])
            out = into if into is not None and total == 0 else self.buffer(self.width)
            self.steps.append(NormStep(source, out, self._form(op, self.width), before))
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
                moved = len(op.inputs) == 1 and all(_is_move(op, out) for out in op.outs)
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
            form = self._form(made, self.width)
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
        heights = [_height(op) for op in ops]
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
        products = [op for op in _between(value) if op.product is not None]
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

    def _find_attention(self) -> tuple[Attention | None, Attention | None]:
        """(attention, cross-attention): keys of the latter do not depend on the hidden states."""
        found = list(_fused_attention(self.graph)) + list(_written_attention(self.graph))
        cross = [a for a in found if self.x not in leaves_of(a.k)]
        own = [a for a in found if a not in cross]
        if len(own) > 1 or len(cross) > 1:
            raise Refusal("it has more than one attention of a kind")
        return (own[0] if own else None), (cross[0] if cross else None)

    def _attend(self, found: Attention) -> int:
        count, size = found.q.shape[1], found.q.shape[3]
        if found.v.shape[-1] != size or found.q.shape[:3:2] != (self.batch, self.tokens):
            raise Refusal("keys and values have different sizes, or tokens are not those of the hidden states")
        q = self._heads_of(found.q, count, size)
        k = self._heads_of(found.k, found.k.shape[1], size, transposed=found.transposed)
        v = self._heads_of(found.v, found.v.shape[1], size)
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
        q = self._heads_of(found.q, count, size)
        k = self._heads_of(found.k, found.k.shape[1], size, found.transposed, length)
        v = self._heads_of(found.v, found.v.shape[1], size, False, length)
        plain = all(h.norm is None and h.rotary is None for h in (q, k, v)) and v.factor == 1 and k.count == v.count
        whole = all(h.start == 0 and _height(h.product) == h.count * size and h.product.path for h in (k, v))
        if not (plain and whole) or found.causal or any(h.product.inputs != states for h in (k, v)):
            raise Refusal("keys and values of cross-attention are not the outputs of linear layers")
        (buffer,) = self._product([q.product])
        heads, result = Heads(count, k.count, size), self.buffer(count * size)
        self.crossed = Cross(
            len(self.steps), (), states[0].name, k.product.path, v.product.path, heads, found.mask,
            not found.transposed,
        )  # fmt: skip
        scale = found.scale * q.factor * k.factor
        self.steps.append(AttentionStep(Columns(buffer, q.start), result, heads, scale, softcap=found.softcap))
        return result

    def _heads_of(
        self, value: Value, count: int, size: int, transposed: bool = False, tokens: int | None = None
    ) -> HeadsOf:
        """How heads [batch, heads, tokens, channels] are computed from a product.

        The recorded operations between them are computed with random values and compared with each possibility.
        """
        tokens = self.tokens if tokens is None else tokens
        ops = list(_between(value))
        products = [op for op in ops if op.product is not None]
        if len(products) != 1:
            raise Refusal("queries, keys or values are not the output of one quantized linear layer")
        (product,) = products
        norms = [op for op in ops if op.product is None and self.norm(op) is not None]
        form = self._form(norms[0], size) if len(norms) == 1 else None
        if len(norms) > 1:
            raise Refusal("heads are normalized more than once")
        (made,) = product.outs
        probe = self.random(made.shape)
        given = {made: probe}
        leaves = list(dict.fromkeys(v for op in ops for v in op.inputs if v.op is None))
        leaves = [v for v in leaves if v.argument and v is not self.x] if leaves else []
        leaves = [v for v in leaves if _reaches(value, v, made)]
        if len(leaves) not in (0, 2):
            raise Refusal(f"heads depend on {len(leaves)} arguments, expected cos and sin")
        for leaf in leaves:
            given[leaf] = self.random(leaf.shape)
        result = replay(value, given)
        result = result.transpose(-1, -2) if transposed else result
        if self.order(made):
            rows = probe.reshape(tokens, self.batch, -1).transpose(0, 1)
        else:
            rows = probe.reshape(self.batch, tokens, -1)
        norm = None if form is None else self._real_norm(norms[0], form)
        if result.shape != (self.batch, count, tokens, size):
            raise Refusal(f"attention has operands of shape {list(result.shape)}")
        for held in [n for n in range(count, 0, -1) if count % n == 0 and n * size <= rows.shape[-1]]:
            for start in range(0, rows.shape[-1] - held * size + 1, size):
                x = rows[..., start : start + held * size].unflatten(-1, (held, size))
                x = x if norm is None else normalize(x, norm)
                for rotary, rotated, cos_sin, y in self._rotations(x, leaves, given, size):
                    y = y.transpose(1, 2).repeat_interleave(count // held, 1)
                    factor = float((result * y).sum() / y.square().sum())
                    if abs(factor) > 1e-6 and close(result, factor * y):
                        factor = 1.0 if abs(factor - 1) < 1e-5 else factor
                        return HeadsOf(product, start, held, form, rotary, rotated, cos_sin, factor)
        raise Refusal("queries, keys or values are not columns of a linear layer, normalized and rotated as usual")

    def _real_norm(self, op: Op, form: NormForm) -> Norm:
        held = {} if op.module is None else op.module._parameters
        return Norm(form.kind, form.eps, held.get("weight"), held.get("bias"), form.offset)

    def _rotations(self, x: Tensor, leaves: list[Value], given: dict[Value, Tensor], size: int) -> Iterator[Any]:
        if not leaves:
            yield None, 0, ("", ""), x
            return
        for cos, sin in (leaves, leaves[::-1]):
            rotated = int(cos.shape[-1])
            if cos.shape != sin.shape or rotated > size or cos.tensor.ndim != 3:
                raise Refusal(f"cos and sin have shape {list(cos.shape)}, expected [batch, tokens, channels]")
            for rotary in ("half", "interleaved"):
                yield rotary, rotated, (cos.name, sin.name), rotate(x, given[cos], given[sin], rotary, rotated)


# -- the graph ---------------------------------------------------------------------------------------------------------


def _title(op: Op) -> str:
    return f"{op.name} ({op.path})" if op.path else op.name


def _height(op: Op) -> int:
    return int(op.outs[0].shape[-1])


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


def _moves_up(value: Value) -> Iterator[Value]:
    """The value and those of which it is computed by operations on one tensor that only move or select elements."""
    yield value
    while value.op is not None and len(value.op.inputs) == 1 and _is_move(value.op, value):
        value = value.op.inputs[0]
        yield value


def _is_move(op: Op, value: Value) -> bool:
    if op.product is not None or len(list(op.outs)) == 0:
        return False
    (source,) = op.inputs
    probe = Random(1).normal(source.shape)
    try:
        moved = replay(value, {source: probe})
    except Refusal:
        return False
    return bool(torch.isin(moved, probe).all())


def _between(value: Value) -> Iterator[Op]:
    """Operations from which a value is computed, back to products, which are included."""
    seen: set[Op] = set()
    todo = [value]
    while todo:
        op = todo.pop().op
        if op is None or op in seen:
            continue
        seen.add(op)
        yield op
        if op.product is None:
            todo.extend(op.inputs)


def leaves_of(value: Value) -> set[Value]:
    """Arguments from which a value is computed."""
    seen, found, todo = set(), set(), [value]
    while todo:
        v = todo.pop()
        if v.argument:
            found.add(v)
        if v.op is not None and v.op not in seen:
            seen.add(v.op)
            todo.extend(v.op.inputs)
    return found


def _depends(value: Value, source: Value) -> bool:
    """Whether a value is computed from another without a product between them."""
    return value is source or any(source in op.inputs for op in _between(value) if op.product is None)


def _reaches(value: Value, leaf: Value, product: Value) -> bool:
    """Whether a leaf is used between a product and a value, not in the input of the product."""
    return any(leaf in op.inputs for op in _between(value) if op.product is None and product.op is not op)


def _fused_attention(graph: Graph) -> Iterator[Attention]:
    for op in graph.ops:
        if op.name != "scaled_dot_product_attention":
            continue
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
        q, k, v = (given[name] for name in names[:3])
        if any(t.tensor.ndim != 4 for t in (q, k, v)):
            raise Refusal("attention is not over [batch, heads, tokens, channels]")
        if given.get("dropout_p"):
            raise Refusal("attention has dropout")
        scale = given.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        yield Attention(q, k, v, op.outs[0], given.get("attn_mask"), scale, causal=bool(given.get("is_causal")))


def _written_attention(graph: Graph) -> Iterator[Attention]:
    """softmax(..) @ v written with single operations."""
    for op in graph.ops:
        if op.name != "softmax" or op.outs[0].tensor.ndim != 4:
            continue
        weights = op.outs[0]
        last = [o for o in graph.ops if _multiplies(o) and _depends(o.args[0], weights)]
        first = [o for o in _between(op.inputs[0]) if _multiplies(o)]
        if len(last) != 1 or len(first) != 1:
            raise Refusal("softmax is not between two matrix products")
        q, k = first[0].args[:2]
        constants = {float(c) for o in _between(op.inputs[0]) for c in (*o.args, *o.kwargs.values()) if _number(c)}
        masks = [v for o in _between(last[0].args[0]) for v in o.inputs if v.op is None and v.tensor.ndim == 4]
        masks = [v for v in dict.fromkeys(masks) if v.argument]
        if len(masks) > 1:
            raise Refusal("more than one mask is added to the scores")
        yield _scores(op, first[0], last[0], q, k, masks[0] if masks else None, constants)


def _scores(op: Op, first: Op, last: Op, q: Value, k: Value, mask: Value | None, constants: set[float]) -> Attention:
    """The scale and the cap of the scores, by computing the weights again from random products of q and k."""
    random = Random(2)
    products = random.normal(first.outs[0].shape) * 3
    given = {first.outs[0]: products}
    added = zeros(())
    if mask is not None:
        given[mask] = added = random.normal(mask.shape)
    weights = replay(last.args[0], given)
    scales = {1.0, *constants, *(1 / c for c in constants if c)}
    for softcap in (0.0, *constants):
        for scale in scales:
            scores = products * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if close(weights, torch.softmax(scores + added, -1)):
                return Attention(q, k, last.args[1], last.outs[0], mask, scale, softcap, False, transposed=True)
    raise Refusal("the scores of attention are not scaled products of queries and keys plus a mask")


def _multiplies(op: Op) -> bool:
    two = len(op.args) == 2 and all(isinstance(v, Value) and v.tensor.ndim == 4 for v in op.args)
    return op.name in ("matmul", "__matmul__") and two


def _number(item: Any) -> bool:
    return isinstance(item, (int, float)) and not isinstance(item, bool) and item > 0


__all__ = ["Found", "Product", "leaves_of", "recognize"]
