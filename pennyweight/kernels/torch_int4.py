"""int4 weight-only on a CPU with torch's own kernel, and the layout that it reads.

``aten._weight_int4pack_mm_for_cpu`` computes x @ ((q - 8) * scale + offset).T for q in 0..15. Its packed bytes depend
on the instruction set of the CPU, so they are never saved to files. It is vectorized only in bfloat16 (float32 takes a
scalar loop, measured 27x slower at one row and 70x at 128), so float32 and float16 inputs are rounded to bfloat16: an
error of 2**-9, compared with 2**-4 for the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import blocks
from ..core.formats import INT4, UINT4
from ..core.layouts import Layout, register_layout, require_fit
from ..core.numerics import Parts
from ..core.spec import TINYGEMM, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import plain_tensors
from .table import Case, Kernel, register_kernel

_MATMUL = torch.ops.aten._weight_int4pack_mm_for_cpu.default
GROUPS = (32, 64, 128, 256)  # supported by the aten op


def _to_nibbles(codes: Tensor, spec: QuantSpec) -> Tensor:
    """Codes as 0..15, where 8 means zero: int32 [N, K]."""
    return codes.to(torch.int32) + (8 if spec.format is INT4 else 0)


def fits_int4pack(spec: QuantSpec, shape: Sequence[int], tile: int = 16) -> bool | str:
    """True, or the reason why aten cannot pack this. tile: rows that it packs together."""
    if len(shape) != 2:
        return "needs a 2-d weight"
    if not ((spec.format is UINT4 and spec.mid == 8) or (spec.format is INT4 and spec.mid == 0)) or spec.zero_point:
        return "needs 4-bit codes centred on zero, without an integer zero point"
    if not isinstance(spec.scale, torch.dtype) or spec.offset not in (None, spec.scale):
        return "needs plain scales and offsets of one dtype"
    rows, group = blocks.resolve(spec.block, shape)
    if rows != 1 or group not in GROUPS:
        return f"needs groups of {GROUPS}, the weight has {group if rows == 1 else (rows, group)}"
    return shape[0] % tile == 0 or f"needs N to be a multiple of {tile}, N is {shape[0]}"


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: aten's packed bytes [N, K/2]; scale: [K/g, N, 2] (scale, offset) in the spec's own dtype; offset: None."""
    require_fit("torch_int4", fits_int4pack(spec, shape), spec, shape)
    _byte_order()  # cached here, outside any trace, where values can be read
    offset = torch.zeros_like(parts.scale) if parts.offset is None else parts.offset
    both = torch.stack([parts.scale, offset], -1).transpose(0, 1).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(_to_nibbles(parts.codes, spec).contiguous(), 1)
    return parts._replace(codes=packed, scale=both, offset=None)


def _rows_of_bytes(packed: Tensor, n: int, k: int, block: int, halves: bool) -> Tensor:
    """Nibbles 0..15 [N, K], for the byte order of one instruction set.

    Each block of ``block`` rows, and the block of remaining rows, is k-major. A byte holds two neighbouring rows, the
    even one in the low nibble; in whole blocks with ``halves`` it holds row d (low) and row d + block/2 (high).
    """
    whole = n // block * block
    flat = packed.reshape(-1)
    full = flat[: whole * k // 2].view(-1, k, block // 2)
    rest = flat[whole * k // 2 :].view(1, k, -1)
    low_high = torch.cat([full & 15, full >> 4], -1) if halves else torch.stack([full & 15, full >> 4], -1).flatten(2)
    pairs = torch.stack([rest & 15, rest >> 4], -1).flatten(2)
    return torch.cat([low_high.transpose(1, 2).reshape(whole, k), pairs[0].t()])


@lru_cache(maxsize=1)
def _byte_order() -> tuple[int, bool] | None:
    """(block, halves) of this CPU, determined by packing known codes; None if the byte order is unknown."""
    known = ((64, True), (32, True), (32, False))  # AVX-512, AVX2, scalar
    with plain_tensors():
        seed = torch.Generator(device="cpu").manual_seed(0)
        codes = torch.randint(0, 16, (112, 32), generator=seed, dtype=torch.int32, device="cpu")
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return next((o for o in known if torch.equal(_rows_of_bytes(packed, 112, 32, *o), codes.to(torch.uint8))), None)


def _nibbles(packed: Tensor, n: int, k: int, group: int) -> Tensor:
    """Nibbles 0..15 [N, K]: from the known byte order, else by multiplying with the identity, which is slow."""
    order = _byte_order()
    if order is not None:
        return _rows_of_bytes(packed, n, k, *order)
    one = torch.ones((k // group, n), dtype=torch.bfloat16, device="cpu")
    unit = torch.stack([one, torch.zeros_like(one)], -1)
    eye = torch.eye(k, dtype=torch.bfloat16, device="cpu")
    rows = torch.ops.aten._weight_int4pack_mm_for_cpu
    return torch.cat([rows(e, packed, group, unit) for e in eye.split(512)]).t().to(torch.int8).add(8).to(torch.uint8)


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    n, k = blocks.padded(spec.block, shape)
    codes = _nibbles(parts.codes, n, k, blocks.resolve(spec.block, shape)[-1])
    if spec.format is INT4:
        codes = codes.to(torch.int8) - 8
    both = parts.scale.transpose(0, 1)
    scale = both[..., 0].contiguous()
    offset = None if spec.offset is None else both[..., 1].contiguous()
    return parts._replace(codes=codes, scale=scale, offset=offset)


_EXAMPLES = (
    (TINYGEMM, (16, 256)),
    (QuantSpec(INT4, (32,), scale=torch.bfloat16), (32, 100)),  # padded to 128
)


def zero_offsets(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes of the zero offsets that aten needs for symmetric weights, one per scale."""
    scales = math.prod(blocks.counts(spec.block, shape))
    return 0 if spec.offset is not None else scales * spec.scale.itemsize  # type: ignore[union-attr]


LAYOUT = register_layout(Layout("torch_int4", pack, unpack, ("cpu",), _EXAMPLES, zero_offsets))


def _accepts(case: Case) -> bool | str:
    return fits_int4pack(case.spec, case.shape) if case.act is None else "the activation is quantized"


def linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = x @ w.T + bias in bfloat16 with float32 sums. x: [.., K], zero-padded to whole groups."""
    codes, scale = w.parts[:2]
    k = 2 * codes.shape[1]
    assert scale is not None
    flat = x.to(torch.bfloat16)
    if x.shape[-1] != k:
        flat = F.pad(flat, (0, k - x.shape[-1]))
    if x.ndim != 2:
        flat = flat.reshape(-1, k)
    y = _MATMUL(flat.contiguous(), codes, k // scale.shape[0], scale.to(torch.bfloat16))
    y = (y if bias is None else y + bias).to(x.dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], codes.shape[0])


register_kernel(Kernel("linear", "torch_int4", linear, _accepts, ("cpu",), LAYOUT.name, rank=20, tolerance="bfloat16"))
