"""What torch.distributed asks of a quantized tensor when it cuts one into shards: DTensor, FSDP2, checkpoints.

They call ``chunk``, ``narrow``, ``new_zeros``, ``pad`` and ``view(-1)`` like anybody else and take the results for
memory of the tensor's own kind: pieces that can be written to, zeros to copy a piece into. For other callers
these ops mean what they mean for floats (pieces that are read-only, zeros that are float), so the caller is looked at.

A piece has the values of the whole, bit for bit. A cut through a block makes the blocks of all pieces finer: the same
scale, written down more than once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import blocks
from ..layouts import READABLE, portable_layout
from ..ops.parts import if_consistent, with_shape
from ..ops.slice import slice_axis
from ..spec import QuantSpec
from ..tensor import AffineQuantizedTensor
from .ddp import to_portable
from .dispatch import PACK

QT = AffineQuantizedTensor
LEAST_BLOCK = 8  # elements: with a float32 scale for fewer, 4 bits become more than 8
ANSWERS: dict[Any, Callable[[QT, Any, Any, str], Any]] = {}  # function of torch -> what it means there


def for_distributed(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an answer ``(w, arguments after it, kwargs, module that calls)``; dispatch.py must hand it on."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        ANSWERS.update(dict.fromkeys(functions, fn))
        return fn

    return add


# -- pieces ----------------------------------------------------------------------------------------------------------


def pack_for_kernel(w: QT) -> QT:
    """w packed for the kernel that will run it."""
    for pack in PACK:
        w = pack(w)
    return w


def shard_spec(w: QT, dim: int, size: int) -> QuantSpec:
    """Spec of pieces of ``size`` entries of a logical axis: that of w, or one of finer blocks where a cut would go
    through a block. Raises ValueError where that cannot be written down."""
    axis = dim % w.ndim if w.axes is None else w.axes[dim % w.ndim]
    spec, shape = w.spec.with_(layout="plain"), w.stored_shape
    block, n = blocks.resolve(spec.block, shape)[axis], shape[axis]
    if size <= 0 or size >= n or block >= n or size % block == 0:
        return spec
    assert spec.block is not None
    fine = math.gcd(block, size)
    sizes = (1,) * (len(shape) - len(spec.block)) + spec.block
    finer = with_shape(sizes, axis, fine)
    numbers = math.prod(n if b == -1 else b for b, n in zip(finer, shape, strict=True))
    parts = [spec.scale, spec.offset]
    if numbers < LEAST_BLOCK or any(isinstance(p, QuantSpec) for p in parts) or fine % spec.format.dim:
        why = "the scales are quantized themselves" if numbers >= LEAST_BLOCK else f"{numbers} would share a scale"
        raise ValueError(
            f"a quantized weight {tuple(w.shape)} ({spec}) cannot be cut into pieces of {size} along axis {dim}: that "
            f"goes through blocks of {block}, and {why}. Choose a group size that divides {size}, or another number of "
            "ranks, or cut another axis"
        )
    return spec.with_(block=finer)


def refine_blocks(w: QT, spec: QuantSpec) -> QT:
    """w, plain, under a spec of finer blocks: each scale written down for every part of its block."""
    w = w.to_layout("plain")
    shape = w.stored_shape
    old, new = blocks.resolve(w.spec.block, shape), blocks.resolve(spec.block, shape)
    counts = blocks.counts(spec.block, shape)
    codes = w._codes
    for axis, n in enumerate(spec.codes_shape(shape)):
        codes = codes.narrow(axis, 0, n)

    def repeat(p: Tensor) -> Tensor:
        for axis, (a, b) in enumerate(zip(old, new, strict=True)):
            if a != b:
                p = p.repeat_interleave(a // b, axis).narrow(axis, 0, counts[axis])
        return p

    slots = {s: repeat(p) for s in ("scale", "zero_point", "offset") if (p := getattr(w, f"_{s}")) is not None}
    return w.with_(codes=codes, spec=spec, readonly=True, **slots)


def prepare_for_shards(w: QT, dim: int, size: int) -> QT:
    """w as it is cut into pieces of ``size``: portable, blocks made finer where that must be."""
    spec = shard_spec(w, dim, size)
    w = to_portable(w)
    if spec == w.spec.with_(layout="plain"):
        return w
    return refine_blocks(w, spec).to_layout(portable_layout(spec))


@for_distributed(torch.chunk, torch.Tensor.chunk)
def _chunk(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """DTensor's pieces are packed for their kernels where the whole was; FSDP2's are kept as they travel."""
    count = args[0] if args else kwargs["chunks"]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % w.ndim
    n = w.shape[dim]
    size = max(1, -(-n // count))
    whole = prepare_for_shards(w, dim, size)
    pieces = [slice_axis(whole, dim, start, min(n, start + size)) for start in range(0, max(n, 1), size)]
    if any(p is NotImplemented for p in pieces):
        raise ValueError(
            f"a quantized weight {tuple(w.shape)} ({w.spec}) cannot be cut into {count} pieces along axis {dim}"
            + (": the order of its channels belongs to the whole axis" if w._perm is not None else "")
            + "; cut another axis, or take another number of ranks"
        )
    repack = w.spec.layout not in READABLE and who.startswith("torch.distributed.tensor")
    return tuple(pack_for_kernel(p) for p in pieces) if repack else tuple(pieces)


@for_distributed(torch.Tensor.narrow, torch.narrow)
def _narrow(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """A piece that shares memory where it can, and may be written to: what else shares its scale is padding, or a part
    of the same tensor that gets the same scale."""
    given = dict(zip(("dim", "start", "length"), args, strict=False)) | kwargs
    dim, start, length = given["dim"] % w.ndim, int(given["start"]), int(given["length"])
    if length == w.shape[dim]:
        return NotImplemented
    source = to_portable(w)
    piece = narrow_rows(source, dim, length) if start == 0 else slice_axis(source, dim, start, start + length)
    if piece is NotImplemented and w._perm is None:
        piece = slice_axis(prepare_for_shards(w, dim, math.gcd(start, length) or length), dim, start, start + length)
    if piece is NotImplemented:
        raise ValueError(
            f"{length} entries from {start} on of axis {dim} of a quantized tensor {tuple(w.shape)} ({w.spec}) go "
            "through a block, or through an axis that lies in an order of its own; use shards of whole blocks"
        )
    if source is w or not who.startswith("torch.distributed.tensor"):  # what is written to a copy would be lost
        shares = piece._codes.untyped_storage().data_ptr() == w._codes.untyped_storage().data_ptr()
        return piece.with_(readonly=w.readonly or not shares)
    return pack_for_kernel(piece.with_(readonly=False))


def narrow_rows(w: QT, dim: int, length: int) -> Any:
    """The first entries of a logical axis, padding of their last block included."""
    axis = dim if w.axes is None else w.axes[dim]
    if axis == w.ndim - 1:
        return slice_axis(w, dim, 0, length)
    shape = with_shape(w.shape, dim, length)
    stored = with_shape(w.stored_shape, axis, length)
    counts = blocks.counts(w.spec.block, stored)[axis]
    slots: dict[str, Any] = {"codes": w._codes.narrow(axis, 0, blocks.padded(w.spec.block, stored)[axis])}
    for slot in ("scale", "zero_point", "offset"):
        p = getattr(w, f"_{slot}")
        if p is not None:
            slots[slot] = narrow_rows(p, axis, counts) if isinstance(p, QT) else p.narrow(axis, 0, counts)
    if any(p is NotImplemented for p in slots.values()):
        return NotImplemented
    return if_consistent(w.with_(shape=shape, **slots))


# -- room ------------------------------------------------------------------------------------------------------------


def zeros_like_spec(w: QT, shape: Sequence[int], spec: QuantSpec | None = None) -> QT:
    """Of the kind of w and of another size: codes and scales of 0; what there is one of in all is w's own."""
    if w.axes is not None:
        raise ValueError(f"a transposed quantized tensor {tuple(w.shape)} cannot be sharded; shard it, then transpose")
    spec = w.spec.with_(layout="plain") if spec is None else spec
    counts = blocks.counts(spec.block, shape)
    w = w.to_layout("plain")
    slots: dict[str, Any] = {"codes": w._codes.new_zeros(spec.codes_shape(shape))}
    for slot in ("scale", "zero_point", "offset"):
        p = getattr(w, f"_{slot}")
        if p is not None:
            slots[slot] = zeros_like_spec(p, counts) if isinstance(p, QT) else p.new_zeros(counts)
    out = w.with_(shape=tuple(shape), spec=spec, readonly=False, **slots)
    return out.to_layout(portable_layout(spec)).with_(readonly=False)


def copy_corner_(target: QT, source: QT) -> None:
    """Write source into the corner of a larger target of its kind; both plain."""
    for slot in ("codes", "scale", "zero_point", "offset"):
        mine, theirs = getattr(target, f"_{slot}"), getattr(source, f"_{slot}")
        if isinstance(mine, QT):
            copy_corner_(mine, theirs)
        elif mine is not None:
            mine[tuple(slice(0, n) for n in theirs.shape)].copy_(theirs)


@for_distributed(torch.Tensor.new_zeros)
def _new_zeros(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Room for a shard."""
    size = kwargs["size"] if "size" in kwargs else args[0] if not isinstance(args[0], int) else args
    other = [d for d, (a, b) in enumerate(zip(w.shape, size, strict=False)) if a != b]
    if len(size) != w.ndim or len(other) > 1:
        return NotImplemented
    if other and other[0] and who.startswith("torch.distributed.fsdp"):
        raise ValueError(
            f"fully_shard of a quantized weight {tuple(w.shape)} along axis {other[0]}: it is cut along axis 0 only; "
            "leave it out of shard_placement_fn"
        )
    return zeros_like_spec(w, size, shard_spec(w, other[0], size[other[0]]) if other else None)


@for_distributed(F.pad)
def _pad(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Room after the last entry of an axis, so that all shards are of one size."""
    pad = list(args[0] if args else kwargs["pad"])
    dim = w.ndim - len(pad) // 2
    if any(pad[:-1]):
        return NotImplemented
    source = w.to_layout("plain")
    out = zeros_like_spec(source, with_shape(w.shape, dim, w.shape[dim] + pad[-1])).to_layout("plain")
    copy_corner_(out, source)
    return pack_for_kernel(out) if w.spec.layout not in READABLE else out.to_layout(portable_layout(out.spec))


@for_distributed(torch.Tensor.view)
def _view(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """FSDP2 keeps its shard as one row of numbers, and does not look at it where a tensor gathers itself."""
    return w.detach() if args == (-1,) and who.startswith("torch.distributed.fsdp") else NotImplemented


@for_distributed(torch.Tensor.copy_)
def _copy_(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Bit for bit, or not at all: a shard quantized anew by itself would not be a shard of the whole."""
    source = args[0] if args else kwargs["src"]
    if not isinstance(source, Tensor) or (type(source) is not Tensor and not isinstance(source, QT)):
        return NotImplemented
    spec = w.spec.with_(layout="plain")
    same = isinstance(source, QT) and source.spec.with_(layout="plain") == spec
    if isinstance(source, QT) and not same and source.shape == w.shape and _finer(source, spec):
        return w.copy_(refine_blocks(source, spec))
    if not same or source.shape != w.shape:
        raise ValueError(
            f"{who}: a quantized tensor {tuple(w.shape)} ({w.spec}) is to take over one of {tuple(source.shape)} "
            f"({source.spec if isinstance(source, QT) else source.dtype}); quantize the model as the one that was "
            "saved, with the same config"
        )
    if w.readonly:
        raise RuntimeError(
            f"{who} writes to a part {tuple(w.shape)} ({w.spec}) that is a copy: of a packed weight (then call "
            "pennyweight.distributed.unpack_(model) before, and pack_(model) after), or cut through a block (then load "
            "on as many ranks as have saved, or choose groups that divide all shards)"
        )
    return NotImplemented


def _finer(w: QT, spec: QuantSpec) -> bool:
    """Whether a spec is that of w but for blocks that divide w's."""
    block, own = spec.block, w.spec.block
    if block is None or own is None or w.axes is not None or isinstance(spec.scale, QuantSpec):
        return False
    shape = w.stored_shape
    pairs = zip(blocks.resolve(own, shape), blocks.resolve(block, shape), strict=True)
    return spec == w.spec.with_(layout="plain", block=block) and all(a % b == 0 for a, b in pairs)
