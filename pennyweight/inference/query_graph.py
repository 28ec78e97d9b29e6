"""Questions about the recorded operations of a block: what a value is computed from, and how; which values are views
or copies of others, the order of their rows; the formulas of norms and activations.

Structure decides, not the class: a module is RMSNorm because it computes x / sqrt(mean(x**2) + eps) * w for random x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels.block import ACTIVATIONS, Norm, normalize
from ..support.errors import Refusal
from .examples import Random
from .trace_block import Op, Value, call_module, replay

# Largest error against the formula, as a fraction of max |y|: float32 rounding, and cos, erf and tanh of other
# libraries. The two GELU formulas differ by 5e-4.
SAME = 2e-5


KINDS: tuple[Literal["layer", "rms"], ...] = ("layer", "rms")


@dataclass(frozen=True)
class NormForm:
    """A :class:`Norm` with the names of its parameters in the block; "" for none."""

    kind: Literal["layer", "rms"]
    eps: float
    weight: str
    bias: str
    offset: float
    width: int


def close(a: Tensor, b: Tensor, tolerance: float = SAME) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def norm_form(op: Op) -> NormForm | None:
    """The formula of a module that normalizes the last axis of its only input; None if it is not a norm."""
    module, inputs = op.module, op.inputs
    if module is None or op.product is not None or len(inputs) != 1 or len(op.outs) != 1:
        return None
    if op.args[:1] != (inputs[0],) or len(op.args) + len(op.kwargs) > 1 or op.outs[0].shape != inputs[0].shape:
        return None
    width, own_parameters = int(inputs[0].shape[-1]), {n: p for n, p in module._parameters.items() if p is not None}
    if not own_parameters.keys() <= {"weight", "bias"} or any(
        tuple(p.shape) != (width,) for p in own_parameters.values()
    ):
        return None
    random = Random(0)
    x = random.normal((5, width)) + 0.3
    parameters = {name: random.uniform((width,)) + 0.5 for name in own_parameters}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    path = f"{op.path}." if op.path else ""
    for eps in _constants(module):
        small = x * eps**0.5  # mean(x**2) near eps shows it
        try:
            ys = [_plain(call_module(module, t, parameters=parameters)) for t in (x, small)]
        except (RuntimeError, TypeError, ValueError):
            return None
        for kind in KINDS:
            for offset in (0.0, 1.0) if weight is not None else (0.0,):
                norm = Norm(kind, eps, weight, bias, offset)
                if all(y is not None and close(y, normalize(t, norm)) for t, y in zip((x, small), ys, strict=True)):
                    names = [path + name if name in own_parameters else "" for name in ("weight", "bias")]
                    return NormForm(kind, eps, names[0], names[1], offset, width)
    return None


def _plain(y: Any) -> Tensor | None:
    return y.float() if isinstance(y, Tensor) else None


def _constants(module: nn.Module) -> Iterator[float]:
    """Candidates for eps: small numbers among the module's attributes; torch's default for RMSNorm."""
    for value in vars(module).values():
        if isinstance(value, float) and 0 < value <= 1e-2:
            yield value
    if getattr(module, "eps", 0.0) is None:
        yield torch.finfo(torch.float32).eps


def activation(x: Tensor, y: Tensor) -> str | None:
    """The name in ACTIVATIONS of the function that gives y for x, of the same shape; None if there is none."""
    return next((name for name, formula in ACTIVATIONS.items() if close(y, formula(x))), None)


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
