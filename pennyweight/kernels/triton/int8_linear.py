"""``linear`` on GPUs with int8 weights and int8 inputs: the row of the kernel table, and its launcher.

The input is quantized in one pass (quantize.py), and the product applies both scales and the bias to the exact sums.
torch's ``_int_mm`` writes the sums to memory, where a chain of operators reads them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from .. import gpu_arguments
from ..table import Bound, Case, Kernel, register_kernel
from ..target import capability, target_of
from ..torch_gpu import LIMITS, accepts_int8
from . import quantize, self_test_verdict, tiles, workspace
from .weight_only import card

NAME = "triton_int8"
FAMILY = "int8"
DEVICES = ("cuda:sm_80+", "hip")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 16  # codes of the widest load: K must be a multiple
BLOCK_ROWS = 512  # rows of the input from which the kernel with tensor descriptors is used


@dataclass(frozen=True)
class Tile:
    """bm, bn, bk  rows of the input, rows of the weight and columns of a step
    warps, stages  Triton's num_warps and num_stages
    swap    whether the weight is the first operand of the matrix unit, which has at least 64 rows
    blocks  whether operands are loaded by tensor descriptors: int8_product_blocks
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    blocks: bool = False


class Operand(NamedTuple):
    """Checked parts of a weight."""

    codes: Tensor
    scale: Tensor
    perm: Tensor | None
    device: torch.device
    act_scale: Tensor | None
    act_zero_point: Tensor | None


@lru_cache(maxsize=4096)
def choose(target: str, m: int, n: int, dtype: torch.dtype, processors: int) -> Tile:
    """The tile for a bucket m of rows, see tiles.BUCKETS.

    128x256x128 with 8 warps and 3 stages was the fastest of those tried on a H100 for many rows; other targets have
    less shared memory, or a matrix unit of another shape.
    """
    hopper = capability(target) == 90
    deep = tiles.shared_memory(target) >= 160_000
    stages = 2 if target.startswith("hip") else 4 if deep else 3
    if m <= 32:
        return Tile(max(m, 16), 64, 256, 4, stages, True)
    if m <= 64:
        return Tile(64, 64, 128, 4, stages, True)
    if not hopper:
        return Tile(128, 128, 64, 8, stages)
    if m >= BLOCK_ROWS and n % 8 == 0 and dtype is not torch.float32:
        return Tile(128, 256, 128, 8, 3, blocks=True)
    if -(-m // 128) * -(-n // 256) < processors:
        return Tile(128, 128, 128, 8, 4)
    return Tile(128, 256, 128, 8, 3)


def launch(
    x: Tensor, scale: Tensor, w: Operand, bias: Tensor | None, dtype: torch.dtype, tile: Tile, processors: int
) -> Tensor:
    """y [M, N] = (x @ codes.T) scale w.scale + bias in dtype, for checked arguments. x: int8 [M, K]; scale: [M, 1] or
    [1, 1]; bias: [N] or None."""
    import triton.language as tl

    from . import int8_linear_kernel

    (m, k), n = x.shape, w.codes.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    held = w.scale if bias is None else bias
    options: dict[str, Any] = {
        "SX": int(scale.numel() > 1), "SW": int(w.scale.numel() > 1), "HAS_B": bias is not None, "BM": tile.bm,
        "BN": tile.bn, "BK": tile.bk, "GROUP": 8, "num_warps": tile.warps, "num_stages": tile.stages,
        "T": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype],
    }  # fmt: skip
    count = -(-m // tile.bm) * -(-n // tile.bn)
    if tile.blocks:
        from triton.tools.tensor_descriptor import TensorDescriptor

        blocks = TensorDescriptor.from_tensor
        int8_linear_kernel.int8_product_blocks[(min(processors, count),)](
            blocks(x, [tile.bm, tile.bk]), blocks(w.codes, [tile.bn, tile.bk]), scale, w.scale, held,
            blocks(y, [tile.bm, tile.bn]), m, n, k, PROGRAMS=processors, **options,
        )  # fmt: skip
        return y
    # where rows of results are no whole 16-byte pieces, a large tile has no registers left to add parts
    parts = 2 * processors if tile.swap or n % 16 == 0 else 1
    split = tiles.split(count, -(-k // tile.bk), parts)
    sums, locks = x, x
    if split > 1:
        sums = workspace.parts(count * split * tile.bm * tile.bn, x.device).view(torch.int32)
        locks = workspace.locks(count, x.device)
    int8_linear_kernel.int8_product[(count, split)](
        x, w.codes, scale, w.scale, held, y, sums, locks, m, n, k, SWAP=tile.swap, EVEN=k % tile.bk == 0, SPLIT=split,
        STAGES=tile.stages, **options,
    )  # fmt: skip
    return y


def operand(spec: QuantSpec, shape: tuple[int, ...], parts: Any) -> Operand:
    """The parts of a weight, checked for the kernel. Raises ArgumentError."""
    codes, device = parts.codes, parts.codes.device
    codes = gpu_arguments.aligned(codes, "codes", torch.int8, shape, device, wide=True)
    scales = 1 if spec.block is None else parts.scale.numel()
    per = shape[0] if scales > 1 else 1
    scale = gpu_arguments.aligned(parts.scale.reshape(-1), "scale", FLOATS, (per,), device)
    return Operand(codes, scale, parts.perm, device, parts.act_scale, parts.act_zero_point)


def bind(case: Case) -> Bound:
    """The kernel for one case: run(x, operand, bias), and parts -> operand."""
    assert case.act is not None
    return bind_static(case.spec, case.act, case.shape, case.dtype)


def bind_static(spec: QuantSpec, act: ActivationSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Bound:
    """As :func:`bind`."""
    n, k = shape

    def run(x: Tensor, w: Operand, bias: Tensor | None) -> Tensor | None:
        axes = x.shape
        given = gpu_arguments.linear_arguments(x, bias, n, k, dtype, w.device, w.perm)
        if given is None:
            return None
        x, bias = given
        m = x.numel() // k
        if m == 0:
            return x.new_empty((*axes[:-1], n))
        q = quantize.encode(x.view(m, k), act, w.act_scale, w.act_zero_point)
        target, _, processors = card(w.device)
        tile = choose(target, tiles.bucket(m), n, dtype, processors)
        return launch(q.codes, q.scale, w, bias, dtype, tile, processors).view(*axes[:-1], n)

    return Bound(run, lambda parts: operand(spec, shape, parts))


def accepts(case: Case) -> bool | str:
    if (verdict := accepts_int8(case)) is not True:
        return verdict
    assert case.act is not None
    if (verdict := quantize.accepts(case.act, case.dtype)) is not True:
        return verdict
    k = case.shape[1]
    if k % UNIT or not k:
        return f"needs K to be a multiple of {UNIT}, K is {k}"
    if k > LIMITS["int8"].most_k:
        return f"sums of {k} products may overflow int32"
    refusals = (self_test_verdict.refusal(case.device, family) for family in (quantize.family(case.act), FAMILY))
    return next(filter(None, refusals), True)


def _linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    case = Case(w.spec, w.act, tuple(w.stored_shape), x.dtype, target_of(w.device), w.perm is not None)
    return bind(case).run_with(x, w.parts, bias)


register_kernel(
    Kernel(
        "linear", NAME, _linear, accepts, DEVICES, "plain", rank=30, tolerance="float32", bind=bind,
        row_independent=True,
    )
)  # fmt: skip
