"""Questions about the recorded operations of a block: what a value is computed from, and how."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..support.errors import Refusal
from .examples import Random
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
