"""Finds attention among the recorded operations of a block, and how its heads are computed from products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.block import Norm, normalize, rotate
from ..support.errors import Refusal
from .examples import Random, zeros
from .query_graph import NormForm, Rows, between, close, depends, leaves_of, reaches
from .trace_block import Graph, Op, Value, replay


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


def find_attention(graph: Graph, x: Value) -> tuple[Attention | None, Attention | None]:
    """(attention, cross-attention): keys of the latter do not depend on the hidden states ``x``. Raises Refusal."""
    found = list(_fused_attention(graph)) + list(_written_attention(graph))
    cross = [a for a in found if x not in leaves_of(a.k)]
    own = [a for a in found if a not in cross]
    if len(own) > 1 or len(cross) > 1:
        raise Refusal("it has more than one attention of a kind")
    return (own[0] if own else None), (cross[0] if cross else None)


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
        last = [o for o in graph.ops if _multiplies(o) and depends(o.args[0], weights)]
        first = [o for o in between(op.inputs[0]) if _multiplies(o)]
        if len(last) != 1 or len(first) != 1:
            raise Refusal("softmax is not between two matrix products")
        q, k = first[0].args[:2]
        constants = {float(c) for o in between(op.inputs[0]) for c in (*o.args, *o.kwargs.values()) if _number(c)}
        masks = [v for o in between(last[0].args[0]) for v in o.inputs if v.op is None and v.tensor.ndim == 4]
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


# -- heads -------------------------------------------------------------------------------------------------------------


def heads_of(
    rows: Rows, value: Value, count: int, size: int, transposed: bool = False, length: int | None = None
) -> HeadsOf:
    """How heads [batch, heads, tokens, channels] are computed from a product.

    The recorded operations between them are computed with random values and compared with each possibility.
    """
    tokens = rows.tokens if length is None else length
    ops = list(between(value))
    products = [op for op in ops if op.product is not None]
    if len(products) != 1:
        raise Refusal("queries, keys or values are not the output of one quantized linear layer")
    (product,) = products
    norms = [op for op in ops if op.product is None and rows.norm(op) is not None]
    form = rows.form(norms[0], size) if len(norms) == 1 else None
    if len(norms) > 1:
        raise Refusal("heads are normalized more than once")
    (made,) = product.outs
    probe = rows.random(made.shape)
    given = {made: probe}
    leaves = list(dict.fromkeys(v for op in ops for v in op.inputs if v.op is None))
    leaves = [v for v in leaves if v.argument and v is not rows.x] if leaves else []
    leaves = [v for v in leaves if reaches(value, v, made)]
    if len(leaves) not in (0, 2):
        raise Refusal(f"heads depend on {len(leaves)} arguments, expected cos and sin")
    for leaf in leaves:
        given[leaf] = rows.random(leaf.shape)
    result = replay(value, given)
    result = result.transpose(-1, -2) if transposed else result
    if rows.order(made):
        columns = probe.reshape(tokens, rows.batch, -1).transpose(0, 1)
    else:
        columns = probe.reshape(rows.batch, tokens, -1)
    norm = None if form is None else _real_norm(norms[0], form)
    if result.shape != (rows.batch, count, tokens, size):
        raise Refusal(f"attention has operands of shape {list(result.shape)}")
    for heads in [n for n in range(count, 0, -1) if count % n == 0 and n * size <= columns.shape[-1]]:
        for start in range(0, columns.shape[-1] - heads * size + 1, size):
            x = columns[..., start : start + heads * size].unflatten(-1, (heads, size))
            x = x if norm is None else normalize(x, norm)
            for rotary, rotated, cos_sin, y in _rotations(x, leaves, given, size):
                y = y.transpose(1, 2).repeat_interleave(count // heads, 1)
                factor = float((result * y).sum() / y.square().sum())
                if abs(factor) > 1e-6 and close(result, factor * y):
                    factor = 1.0 if abs(factor - 1) < 1e-5 else factor
                    return HeadsOf(product, start, heads, form, rotary, rotated, cos_sin, factor)
    raise Refusal("queries, keys or values are not columns of a linear layer, normalized and rotated as usual")


def _real_norm(op: Op, form: NormForm) -> Norm:
    parameters = {} if op.module is None else op.module._parameters
    return Norm(form.kind, form.eps, parameters.get("weight"), parameters.get("bias"), form.offset)


def _rotations(x: Tensor, leaves: list[Value], given: dict[Value, Tensor], size: int) -> Iterator[Any]:
    if not leaves:
        yield None, 0, ("", ""), x
        return
    for cos, sin in (leaves, leaves[::-1]):
        rotated = int(cos.shape[-1])
        if cos.shape != sin.shape or rotated > size or cos.tensor.ndim != 3:
            raise Refusal(f"cos and sin have shape {list(cos.shape)}, expected [batch, tokens, channels]")
        for rotary in ("half", "interleaved"):
            yield rotary, rotated, (cos.name, sin.name), rotate(x, given[cos], given[sin], rotary, rotated)
