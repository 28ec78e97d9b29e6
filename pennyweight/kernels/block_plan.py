"""Steps of a block as structures of the native library: which buffers they use, and which weights it can read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.tensor import AffineQuantizedTensor
from ..support.errors import ArgumentError, Refusal
from .block import ACTIVATIONS, AttentionStep, Columns, LinearStep, Norm, NormStep, RotaryStep, Step, Steps
from .cpu import int_linear
from .cpu.abi import (
    F32,
    MOST_CHANNELS,
    NONE,
    STEP_ATTENTION,
    STEP_LINEAR,
    STEP_NORM,
    STEP_ROTARY,
    Block,
    BlockAttention,
    BlockLinear,
    BlockNorm,
    BlockRotary,
    BlockStep,
    Buffer,
    IntLinear,
    LinearArgs,
    RowNorm,
)
from .cpu.abi import Columns as NativeColumns
from .cpu.block import FUNCTIONS, NORMS, ROTATIONS, Span, place_buffers
from .native.arguments import FLOAT_KINDS, Operand
from .table import case_of

_PARTS = ("zero_point", "offset", "outer_scale", "outer_offset")  # of an Operand, in the order of ``more``


def indices(step: Step) -> tuple[list[int], list[int]]:
    """Buffers that a step reads, and those it writes."""

    def given(*found: int | None) -> list[int]:
        return [i for i in found if i is not None]

    if isinstance(step, LinearStep):
        return given(step.x, step.residual), given(step.normed, *step.out)
    if isinstance(step, NormStep):
        return given(step.x, step.residual), [step.out]
    if isinstance(step, RotaryStep):
        return [step.q.buffer, step.k.buffer, step.v.buffer], [step.q.buffer]
    return given(step.q.buffer, *(c.buffer for c in (step.k, step.v) if c is not None)), [step.out]


# -- checks of the steps -----------------------------------------------------------------------------------------------


def _check_norm(norm: Norm | None, width: int, what: str) -> None:
    if norm is None:
        return
    if norm.kind not in NORMS:
        raise ArgumentError(f"{what}: unknown norm {norm.kind!r}; known: layer, rms")
    for name, p in (("weight", norm.weight), ("bias", norm.bias)):
        if p is not None and tuple(p.shape) != (width,):
            raise ArgumentError(f"{what}: {name} of the norm has shape {list(p.shape)}, expected {[width]}")


def _check_linear(step: LinearStep, widths: tuple[int, ...], what: str) -> None:
    if not step.layers or (step.act is not None and step.act not in ACTIVATIONS):
        raise ArgumentError(f"{what}: {len(step.layers)} layers and the activation {step.act!r}")
    k = widths[step.x]
    for layer in step.layers:
        if layer.weight.ndim != 2 or layer.weight.shape[1] != k:
            raise ArgumentError(f"{what}: a weight {list(layer.weight.shape)} for an input of {k} columns")
        if layer.bias is not None and tuple(layer.bias.shape) != (layer.weight.shape[0],):
            raise ArgumentError(
                f"{what}: a bias {list(layer.bias.shape)} for a weight {list(layer.weight.shape)}; expected one number "
                "for each row"
            )
    rows = [int(layer.weight.shape[0]) for layer in step.layers]
    if step.gated and (len(rows) > 2 or (len(rows) == 2 and rows[0] != rows[1]) or (len(rows) == 1 and rows[0] % 2)):
        raise ArgumentError(f"{what}: gate and up must have the same size, got {rows} rows")
    outs = ([rows[0]] if len(rows) == 2 else [rows[0] // 2]) if step.gated else rows
    if [widths[i] for i in step.out] != outs:
        raise ArgumentError(f"{what}: outputs of {outs} columns for buffers of {[widths[i] for i in step.out]}")
    if step.residual is not None and any(widths[step.residual] != n for n in outs):
        raise ArgumentError(f"{what}: a residual of {widths[step.residual]} columns for outputs of {outs}")
    if step.normed is not None and widths[step.normed] != k:
        raise ArgumentError(f"{what}: {widths[step.normed]} columns for a normalized input of {k}")
    written = [*step.out, *([] if step.normed is None else [step.normed])]
    if len({*written}) < len(written) or (len(step.out) > 1 and {step.x, step.residual} & {*step.out}):
        raise ArgumentError(f"{what}: two outputs in one buffer, or several outputs of which one is an input")
    _check_norm(step.norm, k, what)


def _check_heads(step: RotaryStep | AttentionStep, widths: tuple[int, ...], what: str) -> None:
    h, rotary = step.heads, isinstance(step, RotaryStep)
    if not (1 <= h.size <= MOST_CHANNELS and h.shared >= 1 and h.query % h.shared == 0 and h.query):
        raise ArgumentError(f"{what}: {h}; expected 1 to {MOST_CHANNELS} channels, and a divisor of the query heads")
    for name, columns, count in (("q", step.q, h.query), ("k", step.k, h.shared), ("v", step.v, h.shared)):
        if columns is None:
            continue
        end = columns.start + count * h.size
        if columns.start < 0 or end > widths[columns.buffer]:
            raise ArgumentError(f"{what}: {name} needs columns up to {end}, its buffer has {widths[columns.buffer]}")
        if rotary and columns.buffer < 2:
            raise ArgumentError(f"{what}: {name} must be in a scratch buffer, not in the input or output")
    if isinstance(step, RotaryStep):
        if step.rotary not in ROTATIONS or (
            step.rotary is not None and not (2 <= step.rotated <= h.size and step.rotated % 2 == 0)
        ):
            raise ArgumentError(f"{what}: rotary {step.rotary!r} of {step.rotated} channels of {h.size}")
        _check_norm(step.q_norm, h.size, what)
        _check_norm(step.k_norm, h.size, what)
        return
    if (step.k is None) != (step.v is None) or widths[step.out] != h.query * h.size:
        raise ArgumentError(f"{what}: k and v go together, and the output has {h.query * h.size} columns")
    if step.out in indices(step)[0] or step.softcap < 0:
        raise ArgumentError(f"{what}: an output that is an input, or a negative softcap {step.softcap}")


def check_steps(steps: Steps) -> None:
    """Raise ArgumentError if sizes or indices of the steps do not fit."""
    widths, count = steps.widths, len(steps.widths)
    if count < 2 or not steps.steps or any(n < 1 for n in widths):
        raise ArgumentError(f"a block needs steps, an input and an output; it has {len(steps.steps)} steps, {widths}")
    written: set[int] = set()
    for i, step in enumerate(steps.steps):
        what = f"step {i} ({type(step).__name__})"
        reads, writes = indices(step)
        if any(not 0 <= j < count for j in (*reads, *writes)):
            raise ArgumentError(f"{what}: uses buffers {[*reads, *writes]}, there are {count}")
        if 0 in writes:
            raise ArgumentError(f"{what}: writes to the input (buffer 0)")
        if 1 in reads and 1 not in written:
            raise ArgumentError(f"{what}: reads the output (buffer 1) before it is written")
        written |= {*writes}
        if isinstance(step, LinearStep):
            _check_linear(step, widths, what)
        elif isinstance(step, NormStep):
            if len({widths[j] for j in (*reads, *writes)}) > 1:
                raise ArgumentError(f"{what}: buffers of {[widths[j] for j in (*reads, *writes)]} columns")
            _check_norm(step.norm, widths[step.x], what)
        else:
            _check_heads(step, widths, what)
    if 1 not in written and not steps.partial:
        raise ArgumentError("no step of the block writes the output (buffer 1)")


# -- linear layers -----------------------------------------------------------------------------------------------------


def _weight(w: Tensor, dtype: torch.dtype) -> tuple[IntLinear, Operand]:
    """The structure and the checked parts of a weight. Float inputs have limbs for ``dtype``."""
    if type(w) is not AffineQuantizedTensor:
        raise Refusal(f"needs a quantized weight, not {type(w).__name__} {w.dtype}")
    case = case_of(w, dtype if w.act is None else torch.float32)
    if case.device != "cpu" or w.axes is not None:
        raise Refusal(f"needs a weight on the CPU that is not transposed: {case}")
    if w._perm is not None:
        raise Refusal("needs a weight whose channels are not permuted")
    if w._pre_scale is not None:
        raise Refusal("needs a weight without a pre_scale, by which its input is multiplied (AWQ, SmoothQuant)")
    verdict = int_linear.supports(case)
    if verdict is not True:
        raise Refusal(str(verdict))
    if case.spec.layout != int_linear.LAYOUT.name:
        raise Refusal(f'needs a weight in layout "{int_linear.LAYOUT.name}", this one is in "{case.spec.layout}"')
    struct, operands = int_linear.described(replace(case, spec=case.spec.with_(layout="plain")))
    operand = operands(w.parts)
    if operand.static is not None:
        scale, kind, _, _ = operand.static
        if kind is not torch.float32 or scale.dtype is not torch.float32 or scale.numel() != 1:
            raise Refusal("needs one static activation scale in float32")
    return struct, operand


def _bias_kind(p: Tensor | None, what: str) -> int:
    if p is None:
        return NONE
    if p.dtype not in FLOAT_KINDS or not p.is_contiguous():
        raise Refusal(f"needs {what} that are contiguous, in float32, bfloat16 or float16, not {p.dtype}")
    return FLOAT_KINDS[p.dtype]


@dataclass(frozen=True)
class LinearGroup:
    """Layers of a step that differ in their rows only."""

    step: LinearStep
    weights: Any  # array of IntLinear
    operands: tuple[Operand, ...]
    biases: tuple[Tensor | None, ...]
    out: tuple[int, ...]
    first: bool  # of the groups of its step


def _groups(step: LinearStep, dtype: torch.dtype) -> Iterator[LinearGroup]:
    found: dict[Any, list[int]] = {}
    weights = [_weight(layer.weight, dtype) for layer in step.layers]
    for i, (struct, operand) in enumerate(weights):
        same = IntLinear.from_buffer_copy(struct)
        same.n = 0
        static = None if operand.static is None else (id(operand.static[0]), id(operand.static[2]))
        found.setdefault((bytes(same), static), []).append(i)
    if step.gated and len(found) > 1:
        raise Refusal("needs gate and up quantized alike")
    if step.gated and len(weights) == 1 and weights[0][0].n % 32:
        raise Refusal(f"needs halves of whole tiles of 16 rows, the weight has {weights[0][0].n}")
    for at, rows in enumerate(found.values()):
        for i in rows:
            _bias_kind(step.layers[i].bias, "biases")
        yield LinearGroup(
            step, (IntLinear * len(rows))(*(weights[i][0] for i in rows)), tuple(weights[i][1] for i in rows),
            tuple(step.layers[i].bias for i in rows), step.out if step.gated else tuple(step.out[i] for i in rows),
            at == 0,
        )  # fmt: skip


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is the same in all calls of a block."""

    steps: Steps
    native: tuple[LinearGroup | NormStep | RotaryStep | AttentionStep, ...]
    offsets: tuple[int, ...]
    scratch: int
    given: frozenset[int]  # scratch buffers that are read before they are written: the call must keep them
    rotary: RotaryStep | None  # steps that read the call's tensors: the first one of each kind
    attention: AttentionStep | None
    cached: AttentionStep | None  # reads the call's keys and values

    def operands(self) -> list[Operand]:
        """The parts of all weights."""
        return [operand for group in self.native if isinstance(group, LinearGroup) for operand in group.operands]


def _spans(steps: Steps) -> list[Span | None]:
    """The use of each scratch buffer. Segments are attention alone, and the steps between."""
    spans: list[Span | None] = [None] * len(steps.widths)
    segment, before = -1, True  # before: whether the step before was attention
    for at, step in enumerate(steps.steps):
        attention = isinstance(step, AttentionStep)
        segment, before = segment + (attention or before), attention
        reads, writes = indices(step)
        for i in (*reads, *writes):
            if i > 1:
                span = spans[i] or Span(at, at, segment, segment, True)
                alone = span.alone and span.begin == segment and isinstance(step, (LinearStep, NormStep))
                spans[i] = Span(span.first, at, span.begin, segment, alone)
    return spans


def plan(steps: Steps) -> Plan:
    """Raises ArgumentError if the steps are inconsistent, and Refusal if the native library cannot run them."""
    if steps.dtype not in FLOAT_KINDS:
        raise Refusal(f"needs float32, bfloat16 or float16, not {steps.dtype}")
    check_steps(steps)
    native: list[LinearGroup | NormStep | RotaryStep | AttentionStep] = []
    given, written = set(), {0}
    for at, step in enumerate(steps.steps):
        try:
            if isinstance(step, LinearStep):
                native += _groups(step, steps.dtype)
            else:
                native.append(step)
            for norm in (getattr(step, name, None) for name in ("norm", "q_norm", "k_norm")):
                for p in () if norm is None else (norm.weight, norm.bias):
                    _bias_kind(p, "weights of a norm")
        except Refusal as reason:
            raise Refusal(f"step {at} ({type(step).__name__}): {reason}") from None
        reads, writes = indices(step)
        given |= {*reads} - written
        written |= {*writes}
    offsets, scratch = place_buffers(steps.widths, _spans(steps))
    rotary = [s for s in steps.steps if isinstance(s, RotaryStep)]
    attention = [s for s in steps.steps if isinstance(s, AttentionStep)]
    cached = [s for s in attention if s.k is None]
    sizes = {(s.heads.shared, s.heads.size) for s in rotary} | {(s.heads.shared, s.heads.size) for s in cached}
    turned = [s for s in rotary if s.rotary is not None]
    if len(sizes) > 1 or len({s.rotated for s in turned}) > 1 or len({s.heads.query for s in attention}) > 1:
        raise Refusal("needs one number and size of heads, and of rotated channels, in all steps")
    return Plan(
        steps, tuple(native), tuple(offsets), scratch, frozenset(given), next(iter((*turned, *rotary)), None),
        next(iter(attention), None), next(iter(cached), None),
    )  # fmt: skip


@dataclass
class Structures:
    """The structures of one call at a time.

    parts      parts of weights, and the fields for their addresses
    numbers    biases and parameters of norms, and the fields for their addresses
    zeros      zero points of static activations, their shifts, and the fields for their values
    kept       owners of the memory that the structures point to
    """

    block: Block
    buffers: Any
    address: int
    parts: list[tuple[Tensor, Any, str]] = field(default_factory=list)
    numbers: list[tuple[Tensor, Any, str]] = field(default_factory=list)
    zeros: list[tuple[Tensor, int, Any]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def keep(self, owner: Any) -> int:
        """The address of a structure or array, which lives as long as these structures."""
        self.kept.append(owner)
        return ctypes.addressof(owner)


def _float_kind(p: Tensor) -> int:
    """Raises ArgumentError if a parameter was converted since the plan was made."""
    if p.dtype not in FLOAT_KINDS:
        raise ArgumentError(f"block: a parameter {list(p.shape)} was converted to {p.dtype}; compile the block again")
    return FLOAT_KINDS[p.dtype]


def _norm(s: Structures, norm: Norm | None, to: RowNorm) -> None:
    if norm is None:
        return
    to.kind, to.eps, to.offset = NORMS[norm.kind], norm.eps, norm.offset
    for name in ("weight", "bias"):
        p = getattr(norm, name)
        if p is not None:
            setattr(to, f"{name}_kind", _float_kind(p))
            s.numbers.append((p, to, name))


def _linear(s: Structures, g: LinearGroup) -> BlockLinear:
    step, count = g.step, len(g.weights)
    kept = step.normed is not None and not g.first  # the first group has normalized the input
    args = (LinearArgs * count)()
    to = BlockLinear(
        weights=s.keep(g.weights), args=s.keep(args), out=s.keep((ctypes.c_int32 * len(g.out))(*g.out)), count=count,
        x=step.normed if kept else step.x, normed=-1 if kept or step.normed is None else step.normed,
        residual=-1 if step.residual is None else step.residual, function=FUNCTIONS[step.act], gated=step.gated,
    )  # fmt: skip
    _norm(s, None if kept else step.norm, to.norm)
    for a, w, bias in zip(args, g.operands, g.biases, strict=True):
        named = [("codes", w.codes), ("scale", w.scale), *zip(_PARTS, (p for p, _ in w.more or ()), strict=False)]
        if w.static is not None:
            scale, _, zero, shift = w.static
            named.append(("act_scale", scale))
            if zero is not None:
                s.zeros.append((zero, shift, a))
            a.act_zero_point = -shift
        s.parts += [(p, a, name) for name, p in named if p is not None]
        if bias is not None:
            a.bias_kind = _float_kind(bias)
            s.numbers.append((bias, a, "bias"))
    return to


def _columns(c: Columns | None) -> NativeColumns:
    return NativeColumns(-1, 0) if c is None else NativeColumns(c.buffer, c.start)


def structures(p: Plan) -> Structures:
    """New structures for calls, without addresses."""
    kinds = [FLOAT_KINDS[p.steps.dtype]] * 2 + [F32] * (len(p.steps.widths) - 2)
    buffers = (Buffer * len(kinds))(
        *(Buffer(None, n, at, kind) for n, at, kind in zip(p.steps.widths, p.offsets, kinds, strict=True))
    )
    native = (BlockStep * len(p.native))()
    block = Block(scratch=p.scratch, step_count=len(native), buffer_count=len(buffers), threads=1)
    s = Structures(block, buffers, ctypes.addressof(block))
    block.steps, block.buffers = s.keep(native), s.keep(buffers)
    for to, step in zip(native, p.native, strict=True):
        if isinstance(step, LinearGroup):
            to.kind, to.linear = STEP_LINEAR, s.keep(_linear(s, step))
        elif isinstance(step, NormStep):
            norm = BlockNorm(x=step.x, out=step.out, residual=-1 if step.residual is None else step.residual)
            to.kind, to.norm = STEP_NORM, s.keep(norm)
            _norm(s, step.norm, norm.norm)
        elif isinstance(step, RotaryStep):
            rotary = BlockRotary(
                q=_columns(step.q), k=_columns(step.k), v=_columns(step.v), heads=step.heads.query,
                shared=step.heads.shared, size=step.heads.size, rotation=ROTATIONS[step.rotary], rotated=step.rotated,
            )  # fmt: skip
            to.kind, to.rotary = STEP_ROTARY, s.keep(rotary)
            _norm(s, step.q_norm, rotary.q_norm)
            _norm(s, step.k_norm, rotary.k_norm)
        else:
            to.kind = STEP_ATTENTION
            to.attention = s.keep(
                BlockAttention(
                    q=_columns(step.q), k=_columns(step.k), v=_columns(step.v), out=step.out, heads=step.heads.query,
                    shared=step.heads.shared, size=step.heads.size, scale=step.scale, softcap=step.softcap,
                )
            )  # fmt: skip
    return s
