"""Questions about the recorded operations of a block: what a value is computed from, and how; which values are views
or copies of others, the order of their rows, and norms of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..support.errors import Refusal
from .examples import Random
from .identify import NormForm, norm_form
from .trace_block import Op, Value, replay


def title(op: Op) -> str:
    """An operation in messages."""
    return f"{op.name} ({op.path})" if op.path else op.name


def height(op: Op) -> int:
    """The number of columns of the output."""
    return int(op.outs[0].shape[-1])


def moves_up(value: Value) -> Iterator[Value]:
    """The value and those of which it is computed by operations on one tensor that only move or select elements."""
    yield value
    while value.op is not None and len(value.op.inputs) == 1 and is_move(value.op, value):
        value = value.op.inputs[0]
        yield value


def is_move(op: Op, value: Value) -> bool:
    """Whether an operation on one tensor only moves or selects its elements."""
    if op.product is not None or len(list(op.outs)) == 0:
        return False
    (source,) = op.inputs
    probe = Random(1).normal(source.shape)
    try:
        moved = replay(value, {source: probe})
    except Refusal:
        return False
    return bool(torch.isin(moved, probe).all())


def between(value: Value) -> Iterator[Op]:
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


def depends(value: Value, source: Value) -> bool:
    """Whether a value is computed from another without a product between them."""
    return value is source or any(source in op.inputs for op in between(value) if op.product is None)


def reaches(value: Value, leaf: Value, product: Value) -> bool:
    """Whether a leaf is used between a product and a value, not in the input of the product."""
    return any(leaf in op.inputs for op in between(value) if op.product is None and product.op is not op)


class Rows:
    """The values of a block with the input ``x`` [batch, tokens, width], or [tokens, batch, width].

    outs  values [batch, heads, tokens, channels] whose rows are all heads of a token side by side
    """

    def __init__(self, x: Value, batch_first: bool, outs: set[Value]) -> None:
        self.x, self.outs = x, outs
        (self.batch, self.tokens), self.width = x.shape[:2] if batch_first else x.shape[1::-1], x.shape[2]
        self.swapped: dict[Value, bool] = {x: not batch_first}  # whether rows are in the order (token, batch)
        self.origins: dict[Value, tuple[Value, bool]] = {}
        self.norms: dict[Op, NormForm | None] = {}
        self.random = Random(0).normal

    def origin(self, value: Value) -> tuple[Value, bool]:
        """(The value of which this is a view or copy, whether (batch, token) and (token, batch) are exchanged)."""
        if value not in self.origins:
            self.origins[value] = self._origin(value)
        return self.origins[value]

    def _origin(self, value: Value) -> tuple[Value, bool]:
        chain = list(moves_up(value))
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

    def norm(self, op: Op) -> NormForm | None:
        """The norm that an operation computes, if any."""
        if op not in self.norms:
            self.norms[op] = norm_form(op)
        return self.norms[op]

    def form(self, op: Op, width: int) -> Any:
        """The norm that an operation computes, over ``width`` channels."""
        form = self.norm(op)
        assert form is not None
        if form.width != width:
            raise Refusal(f"{op.path} normalizes {form.width} channels instead of {width}")
        return form
