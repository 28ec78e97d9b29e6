"""Fake quantization of one weight: its quantized value and the gradients through the rounding.

The trained (latent) weight is an ordinary float parameter. Each forward pass quantizes it exactly as ``quantize_`` and
runs the same kernel. Its gradient is that of the quantized weight (straight-through estimator, Bengio et al. 2013).
Scales are recomputed from the latent weight in each pass, or held next to it: computed once by a solver, and optionally
trained (LSQ, Esser et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...algorithms.solvers.rtn import quantize_weight, static_parts
from ...core import blocks, codebook
from ...core.numerics import Parts, dequantize, encode, permute_last_axis, quantize, unpermute_last_axis
from ...core.qparams import Params
from ...core.spec import QuantSpec
from ...core.tensor import SLOTS, AffineQuantizedTensor, check_finite
from ...planning.configs import AOBaseConfig
from ...planning.parameters import Site
from ...planning.scheme import Scheme


class BlockView:
    """Block view of weights of one shape under their spec (contracted axis last, in stored order, padded), and its
    inverse.

    shape       of the parameter in its module
    transposed  whether its last two axes are swapped
    perm        stored order of the contracted axis
    """

    def __init__(self, spec: QuantSpec, shape: torch.Size, transposed: bool, perm: Tensor | None) -> None:
        self.spec, self.transposed, self.perm = spec, transposed, perm
        self.shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        self.counts = blocks.counts(spec.block, self.shape)
        self.padded = blocks.padded(spec.block, self.shape)
        self.codes_shape = spec.codes_shape(self.padded)
        sizes = blocks.resolve(spec.block, self.shape)
        self.view_shape = tuple(n for pair in zip(self.counts, sizes, strict=True) for n in pair)

    def flip(self, x: Tensor) -> Tensor:
        """Convert between the axes of the parameter and the stored axes."""
        return x.transpose(-2, -1) if self.transposed else x

    def view(self, x: Tensor) -> Tensor:
        """The parameter as [g0, b0, g1, b1, ..]; padding repeats the last entries, as in quantization."""
        return blocks.split(blocks.pad(permute_last_axis(self.flip(x), self.perm), self.spec.block), self.counts)

    def zero_padded(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The parameter in stored order, padded with zeros to ``sizes``."""
        y = permute_last_axis(self.flip(x), self.perm)
        short = [m - n for n, m in zip(y.shape, sizes, strict=True)]
        return F.pad(y, [v for s in reversed(short) for v in (0, s)]) if any(short) else y

    def sums(self, x: Tensor) -> Tensor:
        """Sum of each block."""
        view = blocks.split(self.zero_padded(x, self.padded), self.counts)
        return view.sum(blocks.inner_axes(len(self.shape)))

    def back(self, view: Tensor) -> Tensor:
        """Inverse of :meth:`view`."""
        return self.back_flat(view.expand(self.view_shape).reshape(self.padded))

    def back_flat(self, x: Tensor) -> Tensor:
        """Inverse of padding and axis order, for a tensor in stored axes."""
        for axis, n in enumerate(self.shape):
            x = x.narrow(axis, 0, n)
        return self.flip(unpermute_last_axis(x, self.perm))

    def expand(self, part: Tensor) -> Tensor:
        """Expand one value per block to one per element."""
        return self.back(blocks.expand(part))


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class FakeQuantizer:
    """The quantization target of a parameter.

    config   the config of "prepare"; site, scheme, layout: from the plan
    names    parts that are held next to the parameter: "scale", "scale_codes" of a quantized scale, ...; empty: all are
             recomputed from the weight in each forward pass
    learned  the held parts that are trained
    ends     minimum and maximum unclipped value before the scale is applied, without zero point
    """

    config: AOBaseConfig
    site: Site
    scheme: Scheme
    layout: str
    names: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    ends: tuple[float, float] = (-math.inf, math.inf)

    @property
    def spec(self) -> QuantSpec:
        """Spec of the weight in the plain layout."""
        return self.scheme.weight.with_(layout="plain")

    @property
    def holds(self) -> bool:
        """Whether parts of the weight are held, so that its range does not follow the latent weight."""
        return any(not name.startswith("act_") for name in self.names)

    @property
    def weight_learned(self) -> tuple[str, ...]:
        return tuple(name for name in self.learned if not name.startswith("act_"))

    def frame(self, x: Tensor, tensors: Tensors) -> BlockView:
        return BlockView(self.spec, x.shape, self.site.transposed, tensors.get("perm"))


def format_range(spec: QuantSpec) -> tuple[float, float]:
    """Unclipped range of a spec: half a step beyond the smallest and the largest value."""
    f = spec.format
    if f.kind == "learned":
        return -math.inf, math.inf
    if f.kind == "int":
        return f.lo - spec.mid - 0.5, f.hi - spec.mid + 0.5
    numbers = f.numbers()
    low, high = (numbers[1] - numbers[0]) / 2, (numbers[-1] - numbers[-2]) / 2
    return float(numbers[0] - low), float(numbers[-1] + high)


# -- held parts ------------------------------------------------------------------------------------------------------


def flatten_parts(parts: Parts, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All parts except the codes, by name; parts of a quantized part have its name as prefix."""
    for slot, part in zip(SLOTS, parts, strict=True):
        if isinstance(part, Parts):
            yield f"{prefix}{slot}_codes", part.codes
            yield from flatten_parts(part, f"{prefix}{slot}_")
        elif part is not None and slot != "codes":
            yield prefix + slot, part


def _nested(tensors: Tensors, codes: Tensor | None = None) -> Parts:
    """Inverse of :func:`flatten_parts`."""
    parts: dict[str, Any] = {"codes": codes}
    for slot in SLOTS[1:]:
        inner = {n.removeprefix(f"{slot}_"): t for n, t in tensors.items() if n.startswith(f"{slot}_")}
        if slot in tensors:
            parts[slot] = tensors[slot]
        elif "codes" in inner:
            parts[slot] = _nested(inner, inner.pop("codes"))
    return Parts(**parts)


def round_as_stored(fake: FakeQuantizer, tensors: Tensors) -> dict[str, Tensor]:
    """Held parts rounded as in the quantized weight; trained ones are float32 until then."""
    spec, out = fake.spec, dict(tensors)
    for name in fake.learned:
        x = tensors[name].detach()
        if name in ("scale", "offset"):
            kind = getattr(spec, name)
            limit = torch.finfo(kind).max
            out[name] = x.clamp(-limit, limit).to(kind)
        elif name == "zero_point":
            f = spec.zero_point_format
            out[name] = x.round().clamp(f.lo, f.hi).to(spec.zero_point_dtype)
        else:
            out[name] = codebook.stored(x) if name == "table" else x.float()
    return out


def _held(fake: FakeQuantizer, frame: BlockView, tensors: Tensors) -> tuple[Parts, Params]:
    """(parts without codes, their dequantized values)."""
    spec, parts = fake.spec, _nested(round_as_stored(fake, tensors))
    scale, offset = (
        dequantize(part, kind, frame.counts) if isinstance(kind, QuantSpec) else part
        for part, kind in ((parts.scale, spec.scale), (parts.offset, spec.offset))
    )
    return parts, Params(scale, parts.zero_point, offset, parts.table)


def held_parts(fake: FakeQuantizer, x: Tensor, tensors: Tensors) -> Parts:
    """Plain parts of a latent weight quantized with the held parts."""
    frame = fake.frame(x, tensors)
    parts, params = _held(fake, frame, tensors)
    codes = encode(frame.view(x), fake.spec, params)
    return parts._replace(codes=codes.reshape(frame.codes_shape).contiguous())


# -- values ----------------------------------------------------------------------------------------------------------


def quantized_weight(fake: FakeQuantizer, x: Tensor, tensors: Tensors, act: bool = True) -> AffineQuantizedTensor:
    """Quantize a latent weight in its kernel's layout; identical to the result of ``quantize_``.

    act  whether the result includes the activation spec. Raises ValueError if the weight has NaN or inf.
    """
    scheme = fake.scheme if act else fake.scheme.weight_only()
    x = x.detach()
    y = x.transpose(-2, -1) if fake.site.transposed else x
    if fake.holds:
        check_finite(y, fake.site.name)
        parts = held_parts(fake, x, tensors)._replace(**static_parts(scheme, y.device))
        w = AffineQuantizedTensor(parts, fake.spec, y.shape, y.dtype, scheme.act).to_layout(fake.layout)
    else:
        w, _ = quantize_weight(y, scheme, fake.site.name, fake.layout)
    if act and "act_scale" in tensors:
        w = w.with_(act_scale=tensors["act_scale"].detach().float())
    return w.transpose(-2, -1) if fake.site.transposed else w  # type: ignore[return-value]


def fake_quantized_weight(fake: FakeQuantizer, x: Tensor, tensors: Tensors) -> Tensor:
    """Same as :func:`quantized_weight`, as a differentiable float tensor in traceable operations.

    Adds a term that is zero but has the derivative of :class:`QuantizeWeight`.
    """
    spec, frame = fake.spec, fake.frame(x, tensors)
    with torch.no_grad():
        if fake.holds:
            parts = held_parts(fake, x, tensors)
            slope = weight_gradients(fake, x, tensors, parts)
            w = frame.back_flat(_dequantized(parts, spec, frame, x.dtype))
        else:
            parts, slope = quantize(frame.flip(x), spec, fake.scheme.rule, fake.scheme.eps), None
            w = frame.flip(dequantize(parts, spec, frame.shape, x.dtype))
    if slope is None:
        return w + (x - x.detach())
    w = w + (x - x.detach()) * slope.inside.to(x.dtype)
    for name in fake.weight_learned:
        part = (tensors[name] - tensors[name].detach()) * slope.factor
        if name == "table":
            found = codebook.numbers(parts.codes, part, torch.float32)
            found = frame.back_flat(found[tuple(slice(n) for n in frame.padded)])
        else:
            found = frame.expand(part)
        w = w + (found * slope.parts[name]).to(w.dtype)
    return w


def _dequantized(parts: Parts, spec: QuantSpec, frame: BlockView, dtype: torch.dtype) -> Tensor:
    """Dequantized values in stored order, padded."""
    return dequantize(parts._replace(perm=None), spec, frame.padded, dtype)


# -- gradients -------------------------------------------------------------------------------------------------------


class WeightGradients(NamedTuple):
    """Elementwise derivatives of a fake-quantized weight, in the order and shape of the latent weight.

    inside  with respect to the latent weight: 1 within the range, 0 where it clips
    parts   with respect to each element's value of a part, by name; for a table: the table entry of its code
    factor  factor of the gradients of parts: 1 / sqrt(elements of a block * largest value), as in LSQ
    """

    inside: Tensor
    parts: dict[str, Tensor]
    factor: float


def weight_gradients(fake: FakeQuantizer, x: Tensor, tensors: Tensors, parts: Parts) -> WeightGradients:
    """With grid value n, scale s, offset o and u = (x - o) / s the weight is n s + o, and

    d/dx = inside,  d/ds = n - inside u,  d/do = 1 - inside,  d/dz = -s (1 - inside),  d/dn = s
    """
    spec, frame = fake.spec, fake.frame(x, tensors)
    f, p = spec.format, _held(fake, frame, tensors)[1]
    scale, offset, zero = (None if v is None else blocks.expand(v.float()) for v in (p.scale, p.offset, p.zero_point))
    view = frame.view(x.detach()).float()
    if p.table is not None:
        number = codebook.numbers(parts.codes, p.table, torch.float32)[tuple(slice(n) for n in frame.padded)]
    else:
        number = f.decode(parts.codes, torch.float32) - spec.mid
    number = number.reshape(view.shape)
    u = view if offset is None else view - offset
    if scale is not None:
        u = u / torch.where(scale == 0, torch.inf, scale)
    at = u if zero is None else u + zero
    inside = ((at >= fake.ends[0]) & (at <= fake.ends[1])).float()
    number = number if zero is None else number - zero
    ways = {
        "scale": number - inside * u,
        "offset": 1 - inside,
        "zero_point": (inside - 1) * (1.0 if scale is None else scale),
        "table": view.new_ones(()) if scale is None else scale,
    }
    reach = 1.0 if p.table is not None else float(max(abs(f.lo - spec.mid), abs(f.hi - spec.mid)))
    count = x.numel() // 2**f.bits if p.table is not None else math.prod(blocks.resolve(spec.block, frame.shape))
    found = {name: frame.back(ways[name]) for name in fake.weight_learned}
    return WeightGradients(frame.back(inside), found, 1 / math.sqrt(max(1.0, count * reach)))


class QuantizeWeight(torch.autograd.Function):
    """Autograd function: latent weight, held parts -> quantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fake: FakeQuantizer, fixed: Tensors, act: bool, *learnt: Tensor) -> Tensor:
        tensors = {**fixed, **dict(zip(fake.weight_learned, learnt, strict=True))}
        w = quantized_weight(fake, x, tensors, act)
        ctx.fake, ctx.fixed, ctx.dtype = fake, fixed, x.dtype
        ctx.save_for_backward(*((x, *learnt) if fake.holds else ()))
        return w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        fake: FakeQuantizer = ctx.fake
        if not fake.holds:
            return grad.to(ctx.dtype), None, None, None
        x, *learnt = ctx.saved_tensors
        grad = grad.to_dense() if grad.is_sparse else grad
        tensors = {**ctx.fixed, **dict(zip(fake.weight_learned, learnt, strict=True))}
        parts, frame = held_parts(fake, x, tensors), fake.frame(x, tensors)
        slope = weight_gradients(fake, x, tensors, parts)
        grads = []
        for name, tensor in zip(fake.weight_learned, learnt, strict=True):
            each = grad.float() * slope.parts[name]
            found = _by_number(each, parts, frame, tensor) if name == "table" else frame.sums(each)
            grads.append((found * slope.factor).to(tensor.dtype))
        return (grad * slope.inside).to(ctx.dtype), None, None, None, *grads


def _by_number(grad: Tensor, parts: Parts, frame: BlockView, table: Tensor) -> Tensor:
    """Sums over the elements with the same code, [codes, dim]."""
    entries, dim = table.shape
    rows = frame.zero_padded(grad, (*frame.codes_shape[:-1], frame.codes_shape[-1] * dim)).reshape(-1, dim)
    total = torch.zeros((entries, dim), dtype=torch.float32, device=grad.device)
    return total.index_add_(0, parts.codes.reshape(-1).long(), rows.float())
