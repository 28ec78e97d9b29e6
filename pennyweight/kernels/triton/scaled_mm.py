"""``linear`` on GPUs with int8 or float8 weights and inputs: rows of the kernel table, and their launcher.

The input is quantized in one pass (quantize.py), and the product applies both scales and the bias to the sums. torch's
``_int_mm`` writes the sums to memory, where a chain of operators reads them again. Its ``_scaled_mm`` is fast for many
rows, where this file calls it; for few rows memory decides, and its tiles leave most multiprocessors without work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.formats import E4M3, INT8, Format
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from .. import gpu_arguments
from ..table import Bound, Case, Kernel, register_kernel
from ..target import capability, target_of
from ..torch_gpu import LIMITS, accepts_int8, accepts_scaled_mm, float8_product
from . import quantize, self_test_verdict, tiles, workspace
from .launch import Launcher
from .weight_only import card

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNIT = 16  # codes of the widest load: K must be a multiple
BLOCK_ROWS = 512  # rows of the input from which the kernel with tensor descriptors is used
# Name of the row, families of its self-test (self_test_verdict.FAMILIES), devices, tolerance
ROWS = {
    INT8: ("triton_int8", "int8", ("cuda:sm_80+", "hip"), "float32"),
    E4M3: ("triton_float8", "float8", ("cuda:sm_89+",), "bfloat16"),
}


@dataclass(frozen=True)
class Tile:
    """bm, bn, bk  rows of the input, rows of the weight and columns of a step
    warps, stages  Triton's num_warps and num_stages
    swap    whether the weight is the first operand of the matrix unit, which has at least 64 rows
    blocks  whether operands are loaded by tensor descriptors: product_blocks
    ahead   whether the kernel starts before the one in front of it has ended (compute capability 9.0 and later)
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    swap: bool = False
    blocks: bool = False
    ahead: bool = False


class Operand(NamedTuple):
    """Checked parts of a weight."""

    codes: Tensor
    scale: Tensor
    perm: Tensor | None
    device: torch.device
    act_scale: Tensor | None
    act_zero_point: Tensor | None


@lru_cache(maxsize=4096)
def choose(f: Format, target: str, m: int, n: int, dtype: torch.dtype, processors: int) -> Tile | None:
    """The tile for a bucket m of rows, see tiles.BUCKETS; None: torch's product.

    128x256x128 with 8 warps and 4 stages was the fastest of those tried on a H100 for many rows of int8; other targets
    have less shared memory, or a matrix unit of another shape.
    """
    hopper = capability(target) == 90
    deep = tiles.shared_memory(target) >= 160_000
    stages = 2 if target.startswith("hip") else 4 if deep else 3
    if m <= 32:
        return Tile(max(m, 16), 64, 256, 4, stages, True, ahead=capability(target) >= 90)
    if m <= 64:
        return Tile(64, 64, 128, 4, stages, True, ahead=capability(target) >= 90)
    if f is not INT8:
        return None
    if not hopper:
        return Tile(128, 128, 64, 8, stages)
    if m >= BLOCK_ROWS and n % 8 == 0 and dtype is not torch.float32:
        return Tile(128, 256, 128, 8, 4, blocks=True)
    if -(-m // 128) * -(-n // 256) < processors:
        return Tile(128, 128, 128, 8, 4)
    return Tile(128, 256, 128, 8, 3)


def launch(
    x: Tensor, scale: Tensor, w: Operand, bias: Tensor | None, dtype: torch.dtype, tile: Tile, processors: int
) -> Tensor:
    """y [M, N] = (x @ codes.T) scale w.scale + bias in dtype, for checked arguments. x: [M, K], of the weight's format;
    scale: [M, 1] or [1, 1]; bias: [N] or None."""
    (m, k), n = x.shape, w.codes.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=x.device)
    held = w.scale if bias is None else bias
    count = -(-m // tile.bm) * -(-n // tile.bn)
    per_row = scale.numel() > 1, w.scale.numel() > 1
    if tile.blocks:
        from triton.tools.tensor_descriptor import TensorDescriptor

        from . import scaled_mm_kernel

        blocks = TensorDescriptor.from_tensor
        scaled_mm_kernel.product_blocks[(min(processors, count),)](
            blocks(x, [tile.bm, tile.bk]), blocks(w.codes, [tile.bn, tile.bk]), scale, w.scale, held,
            blocks(y, [tile.bm, tile.bn // 2]), m, n, k, PROGRAMS=processors,
            **_options(tile, *per_row, bias is not None, dtype),
        )  # fmt: skip
        return y
    # where rows of results are no whole 16-byte pieces, a large tile has no registers left to add parts
    parts = 2 * processors if tile.swap or n % 16 == 0 else 1
    split = tiles.split(count, -(-k // tile.bk), parts)
    sums, locks = x, x
    if split > 1:
        sums = workspace.parts(count * split * tile.bm * tile.bn, x.device)
        sums = sums.view(torch.int32) if x.dtype is torch.int8 else sums
        locks = workspace.locks(count, x.device)
    dtypes = x.dtype, w.scale.dtype, None if bias is None else bias.dtype, dtype
    run = _launcher(tile, split, n, k, *per_row, *dtypes, x.device)
    run((count, split, 1), (x, w.codes, scale, w.scale, held, y, sums, locks), (m, n, k))
    return y


@lru_cache(maxsize=1024)
def _options(tile: Tile, x_rows: bool, w_rows: bool, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of both kernels that are known while they are compiled. x_rows, w_rows: whether there is a scale for
    each row."""
    import triton.language as tl

    return {
        "SX": int(x_rows), "SW": int(w_rows), "HAS_B": bias, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk,
        "GROUP": 16 if tile.blocks else 8, "num_warps": tile.warps, "num_stages": tile.stages,
        "T": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype],
    }  # fmt: skip


@lru_cache(maxsize=4096)
def _launcher(
    tile: Tile, split: int, n: int, k: int, x_rows: bool, w_rows: bool, codes: torch.dtype, scale: torch.dtype,
    bias: torch.dtype | None, dtype: torch.dtype, device: torch.device,
) -> Launcher:  # fmt: skip
    """The kernel for a weight [n, k]; dtypes of codes, of the weight's scales, bias and result."""
    import triton.language as tl

    from . import scaled_mm_kernel

    options = _options(tile, x_rows, w_rows, bias is not None, dtype)
    more: dict[str, Any] = {"SWAP": tile.swap, "EVEN": k % tile.bk == 0, "SPLIT": split, "STAGES": tile.stages}
    more |= {"ACC": tl.int32 if codes is torch.int8 else tl.float32, "AHEAD": tile.ahead}
    more |= {"launch_pdl": True} if tile.ahead else {}
    return Launcher(lambda: scaled_mm_kernel.product, options | more)


def operand(spec: QuantSpec, shape: tuple[int, ...], parts: Any) -> Operand:
    """The parts of a weight, checked for the kernel. Raises ArgumentError."""
    codes, device = parts.codes, parts.codes.device
    codes = gpu_arguments.aligned(codes, "codes", spec.format.code_dtype, shape, device, wide=True)
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
    encode = quantize.quantizer(act, dtype)

    def product(x: Tensor, w: Operand, bias: Tensor | None) -> Tensor:
        q = encode(x, w.act_scale, w.act_zero_point)
        target, _, processors = card(w.device)
        tile = choose(spec.format, target, tiles.bucket(x.shape[0]), n, dtype, processors)
        if tile is None:
            return float8_product(q, w.codes, w.scale, bias, dtype)
        return launch(q.codes, q.scale, w, bias, dtype, tile, processors)

    return Bound(gpu_arguments.linear_kernel(product, n, k, dtype), lambda parts: operand(spec, shape, parts))


def accepts(f: Format, case: Case) -> bool | str:
    if (verdict := accepts_int8(case) if f is INT8 else accepts_scaled_mm(case)) is not True:
        return verdict
    assert case.act is not None
    if f is not INT8 and not case.spec.format is case.act.spec.format is f:
        return f"needs {f} on both sides"
    if (verdict := quantize.accepts(case.act, case.dtype)) is not True:
        return verdict
    k = case.shape[1]
    if k % UNIT or not k:
        return f"needs K to be a multiple of {UNIT}, K is {k}"
    if f is INT8 and k > LIMITS["int8"].most_k:
        return f"sums of {k} products may overflow int32"
    families = (quantize.family(case.act), ROWS[f][1])
    return next(filter(None, (self_test_verdict.refusal(case.device, family) for family in families)), True)


def _linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    case = Case(w.spec, w.act, tuple(w.stored_shape), x.dtype, target_of(w.device), w.perm is not None)
    return bind(case).run_with(x, w.parts, bias)


for _format, (_name, _, _devices, _tolerance) in ROWS.items():
    register_kernel(
        Kernel(
            "linear", _name, _linear, partial(accepts, _format), _devices, "plain", rank=31, tolerance=_tolerance,
            bind=bind, row_independent=_format is INT8,
        )
    )  # fmt: skip
