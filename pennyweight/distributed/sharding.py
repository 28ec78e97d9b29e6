"""Sharding of quantized tensors for torch.distributed: DTensor, FSDP2, checkpoints.

They call ``chunk``, ``narrow``, ``new_zeros``, ``pad`` and ``view(-1)`` and expect quantized results: writable pieces,
and zeros to copy a piece into. For other callers these ops behave as usual (read-only pieces, float zeros), so the
handlers depend on the caller.

A piece has the values of the whole, bit for bit. A cut through a block refines the blocks of all pieces, by repeating
the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..core import blocks
from ..core.layouts import READABLE, portable_layout
from ..core.ops.parts import if_consistent, to_portable, with_shape
from ..core.ops.slice import slice_axis
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.repack import pack_for_kernel

QT = AffineQuantizedTensor
LEAST_BLOCK = 8  # elements; a float32 scale for fewer would raise 4 bits per weight to more than 8

# -- pieces ----------------------------------------------------------------------------------------------------------


def shard_spec(w: QT, dim: int, size: int) -> QuantSpec:
    """Spec of pieces of ``size`` entries of a logical axis: that of w, or one with finer blocks if a cut would go
    through a block. Raises ValueError if finer blocks are not possible."""
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
        why = "the scales are quantized" if numbers >= LEAST_BLOCK else f"only {numbers} weights would share a scale"
        raise ValueError(
            f"a quantized weight {tuple(w.shape)} ({spec}) cannot be cut into pieces of {size} along axis {dim}: this "
            f"cuts through blocks of {block}, and {why}. Choose a group size that divides {size}, another number of "
            "ranks, or another axis"
        )
    return spec.with_(block=finer)


def refine_blocks(w: QT, spec: QuantSpec) -> QT:
    """w in layout "plain" under a spec with finer blocks; each scale is repeated for every part of its block."""
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
    """w ready to be cut into pieces of ``size``: in a portable layout, with finer blocks if needed."""
    spec = shard_spec(w, dim, size)
    w = to_portable(w)
    if spec == w.spec.with_(layout="plain"):
        return w
    return refine_blocks(w, spec).to_layout(portable_layout(spec))


def chunk(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """DTensor's pieces are packed for their kernels if the whole was; FSDP2's stay in the layout that is sent."""
    count = args[0] if args else kwargs["chunks"]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % w.ndim
    n = w.shape[dim]
    size = max(1, -(-n // count))
    whole = prepare_for_shards(w, dim, size)
    pieces = [slice_axis(whole, dim, start, min(n, start + size)) for start in range(0, max(n, 1), size)]
    if any(p is NotImplemented for p in pieces):
        raise ValueError(
            f"a quantized weight {tuple(w.shape)} ({w.spec}) cannot be cut into {count} pieces along axis {dim}"
            + (": its channels are permuted over the whole axis" if w._perm is not None else "")
            + "; cut another axis, or use another number of ranks"
        )
    repack = w.spec.layout not in READABLE and who.startswith("torch.distributed.tensor")
    return tuple(pack_for_kernel(p) for p in pieces) if repack else tuple(pieces)


def narrow(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """A writable piece that shares memory if possible: its scale is shared only with padding, or with a part of the
    same tensor that gets the same scale."""
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
            f"{length} entries from {start} on of axis {dim} of a quantized tensor {tuple(w.shape)} ({w.spec}) cut "
            "through a block or a permuted axis; use shards of whole blocks"
        )
    if source is w or not who.startswith("torch.distributed.tensor"):  # writes to a copy would be lost
        shares = piece._codes.untyped_storage().data_ptr() == w._codes.untyped_storage().data_ptr()
        return piece.with_(readonly=w.readonly or not shares)
    return pack_for_kernel(piece.with_(readonly=False))


def narrow_rows(w: QT, dim: int, length: int) -> Any:
    """The first entries of a logical axis, including the padding of their last block."""
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


# -- allocation ------------------------------------------------------------------------------------------------------


def zeros_like_spec(w: QT, shape: Sequence[int], spec: QuantSpec | None = None) -> QT:
    """A tensor like w with another shape: codes and scales are 0, per-tensor parts such as tables are those of w."""
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
    """Write source into the leading corner of a larger target of its kind; both in layout "plain"."""
    for slot in ("codes", "scale", "zero_point", "offset"):
        part, other = getattr(target, f"_{slot}"), getattr(source, f"_{slot}")
        if isinstance(part, QT):
            copy_corner_(part, other)
        elif part is not None:
            part[tuple(slice(0, n) for n in other.shape)].copy_(other)


def new_zeros(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Allocate a shard."""
    size = kwargs["size"] if "size" in kwargs else args[0] if not isinstance(args[0], int) else args
    other = [d for d, (a, b) in enumerate(zip(w.shape, size, strict=False)) if a != b]
    if len(size) != w.ndim or len(other) > 1:
        return NotImplemented
    if other and other[0] and who.startswith("torch.distributed.fsdp"):
        raise ValueError(
            f"fully_shard of a quantized weight {tuple(w.shape)} along axis {other[0]}: only axis 0 is supported; "
            "exclude it from shard_placement_fn"
        )
    return zeros_like_spec(w, size, shard_spec(w, other[0], size[other[0]]) if other else None)


def pad(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Pad the end of an axis, so that all shards have one size."""
    pad = list(args[0] if args else kwargs["pad"])
    dim = w.ndim - len(pad) // 2
    if any(pad[:-1]):
        return NotImplemented
    source = w.to_layout("plain")
    out = zeros_like_spec(source, with_shape(w.shape, dim, w.shape[dim] + pad[-1])).to_layout("plain")
    copy_corner_(out, source)
    return pack_for_kernel(out) if w.spec.layout not in READABLE else out.to_layout(portable_layout(out.spec))


def copy_(w: QT, args: Any, kwargs: Any, who: str) -> Any:
    """Copies bit for bit or raises: a shard requantized on its own would not be a shard of the whole."""
    source = args[0] if args else kwargs["src"]
    if not isinstance(source, Tensor) or (type(source) is not Tensor and not isinstance(source, QT)):
        return NotImplemented
    spec = w.spec.with_(layout="plain")
    same = isinstance(source, QT) and source.spec.with_(layout="plain") == spec
    if isinstance(source, QT) and not same and source.shape == w.shape and _finer(source, spec):
        return w.copy_(refine_blocks(source, spec))
    if not same or source.shape != w.shape:
        raise ValueError(
            f"{who}: cannot load a tensor {tuple(source.shape)} "
            f"({source.spec if isinstance(source, QT) else source.dtype}) into a quantized tensor {tuple(w.shape)} "
            f"({w.spec}); quantize the model with the same config as the saved one"
        )
    if w.readonly:
        raise RuntimeError(
            f"{who} writes to a part {tuple(w.shape)} ({w.spec}) that is a copy. If the weight is packed, call "
            "pennyweight.distributed.unpack_(model) before and pack_(model) after. If a block was cut, load on as many "
            "ranks as saved, or choose a group size that divides all shards"
        )
    return NotImplemented


def _finer(w: QT, spec: QuantSpec) -> bool:
    """Whether a spec equals that of w except for finer blocks that divide w's."""
    block, own = spec.block, w.spec.block
    if block is None or own is None or w.axes is not None or isinstance(spec.scale, QuantSpec):
        return False
    shape = w.stored_shape
    pairs = zip(blocks.resolve(own, shape), blocks.resolve(block, shape), strict=True)
    return spec == w.spec.with_(layout="plain", block=block) and all(a % b == 0 for a, b in pairs)
