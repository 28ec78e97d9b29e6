"""GPU kernels that torch brings: float8 and int8 products with quantized inputs, MX and NVFP4, int4 weights, experts.

docs/gpu.md says which of them have run on a device. What each op of torch takes is data, :data:`LIMITS`: read from
aten/native/cuda (Blas.cpp, int4mm.cu, GroupedBlas.cpp) of torch 2.11 to 2.13. ``training/low_precision`` asks the same.
tests/kernels/test_torch_gpu.py holds that the limits are at least as strict as torch's own fake functions, and compares
packing, orientation of scales and padding with a reference of each op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import blocks
from ..core.formats import E2M1, E4M3, E5M2, INT7, INT8
from ..core.numerics import Parts
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from .activation import encode_activation
from .gpu_arguments import aligned, rows, vector
from .table import Case, Kernel, register_kernel
from .target import fits
from .torch_gpu_layouts import (
    BLOCK_TILES,
    INT4_TILES,
    block_codes,
    fits_blocks,
    fits_int4,
    is_mx,
    is_nvfp4,
    tiled_scales,
)
from .triton.quantize import quantized

QT = AffineQuantizedTensor
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])


# -- what torch's ops take ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What an op takes for x [M, K] @ w [N, K].T on a GPU.

    devices   targets, see target.py
    n, k      N and K must be multiples of these
    outputs   dtypes of the result
    most_k    the largest K; 0: any
    broken    (target, first torch release without the fault, the fault)
    """

    op: str
    devices: tuple[str, ...]
    n: int
    k: int
    outputs: tuple[torch.dtype, ...] = FLOATS
    most_k: int = 0
    broken: tuple[tuple[str, tuple[int, int], str], ...] = ()

    def refuses(self, target: str, dtype: torch.dtype, shape: Sequence[int] | None = None) -> str | None:
        """The sentence that refuses a case, or None. dtype: of the result. shape: (N, K); None if the caller pads."""
        if not fits(self.devices, target):
            return f"{self.op} runs on {', '.join(self.devices)} only, this is {target}"
        for where, since, fault in self.broken:
            if fits((where,), target) and since > _TORCH:
                return f"{self.op} {fault} on {where} before torch {since[0]}.{since[1]}"
        if dtype not in self.outputs:
            names = " or ".join(str(d).removeprefix("torch.") for d in self.outputs)
            return f"{self.op} gives {names} results, the input is {str(dtype).removeprefix('torch.')}"
        if shape is None:
            return None
        for name, size, unit in zip("NK", shape, (self.n, self.k), strict=True):
            if size % unit or not size:
                return f"{self.op} needs {name} to be a multiple of {unit}, {name} is {size}"
        if self.most_k and shape[1] > self.most_k:
            return f"{self.op}: sums of {shape[1]} products may overflow int32"
        return None


_WRONG_STREAM = ("cuda:sm_89", (2, 12), "launches on another stream than the current one")  # pytorch issue 177651
LIMITS = {
    "tensor": Limits("torch._scaled_mm", ("cuda:sm_89+",), 16, 16),
    "rows": Limits(
        "torch._scaled_mm with row scales", ("cuda:sm_89+",), 16, 16, (torch.bfloat16,), broken=(_WRONG_STREAM,)
    ),
    "mx": Limits("torch._scaled_mm with MX scales", ("cuda:sm_100+",), 16, 32, (torch.bfloat16,)),
    "nvfp4": Limits("torch._scaled_mm with NVFP4 scales", ("cuda:sm_100+",), 16, 32, (torch.bfloat16,)),
    "int8": Limits("torch._int_mm", ("cuda", "hip"), 8, 8, most_k=((1 << 31) - 1) // (128 * 128)),
    "int4": Limits("torch._weight_int4pack_mm", ("cuda:sm_80+",), 8, 32, (torch.bfloat16,)),
    "experts": Limits(
        "torch._scaled_grouped_mm", ("cuda:sm_90", "cuda:sm_100"), 16, 16, (torch.bfloat16,)
    ),
}  # fmt: skip


def _within(limits: Limits, case: Case) -> bool | str:
    n, k = case.shape[-2], blocks.padded(case.spec.block, case.shape)[-1]
    return limits.refuses(case.device, case.dtype, (n, k)) or True


# -- shared ------------------------------------------------------------------------------------------------------------


def _biased(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """y [M, N] + bias, in x's dtype and with the axes of x. Sums of float32 are rounded once."""
    y = (y if bias is None else y + bias).to(x.dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def _no_rows(x: Tensor, n: int) -> Tensor:
    return x.new_zeros((*x.shape[:-1], n))


def _is_per_row(spec: QuantSpec, shape: Sequence[int]) -> bool | None:
    """Whether each row has a scale, or all share one; None: neither, or rows are padded."""
    if spec.block is None:
        return False
    alone = blocks.padded(spec.block, shape) == tuple(shape) and set(spec.block[:-1]) <= {1}
    return True if alone and blocks.counts(spec.block, shape)[-1] == 1 else None


def _act(case: Case) -> ActivationSpec | str:
    return "weight-only: the activation is not quantized" if case.act is None else case.act


# -- int8 x int8 -------------------------------------------------------------------------------------------------------

LEAST_ROWS, PADDED_ROWS = 17, 32  # _int_mm needs more than 16 rows: fewer are padded to 32


def _accepts_int_mm(case: Case) -> bool | str:
    verdict = accepts_int8(case)
    return verdict if verdict is not True else _within(LIMITS["int8"], case)


def accepts_int8(case: Case) -> bool | str:
    """True, or why the codes of weight and input are no operands of an int8 product, whatever the sizes."""
    act = _act(case)
    if isinstance(act, str):
        return act
    for what, spec in (("weights", case.spec), ("activations", act.spec)):
        if spec.format not in (INT7, INT8) or not _plain(spec):
            return f"needs symmetric int8 (or 7-bit) {what} with a plain scale"
    if len(case.shape) != 2 or _is_per_row(case.spec, case.shape) is None:
        return "needs a 2-d weight with one scale per row or per tensor"
    if act.spec.block not in (None, (-1,)):
        return "needs one activation scale per token or per tensor"
    return True


def _plain(spec: QuantSpec) -> bool:
    return isinstance(spec.scale, torch.dtype) and not spec.zero_point and spec.offset is None and not spec.mid


def int_mm(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """y = (qx @ qw.T) * sx * sw + bias; sums exact in int32, scaled in float32. x: [.., K]; w: [N, K]."""
    n, k = w._codes.shape
    if not x.numel():
        return _no_rows(x, n)
    codes = aligned(w._codes, "codes", torch.int8, (n, k), x.device)
    assert w._scale is not None
    assert w.act is not None
    q = quantized(rows(x, k, FLOATS, x.device), w.act, w.act_scale, w.act_zero_point)
    m, a = q.codes.shape[0], q.codes.contiguous()
    if m < LEAST_ROWS:
        a = F.pad(a, (0, 0, 0, PADDED_ROWS - m))
    total = torch._int_mm(a, codes.t())[:m]
    return _biased(total * q.scale.float() * w._scale.float().reshape(-1), bias, x)


# -- float8 x float8 ---------------------------------------------------------------------------------------------------


def accepts_scaled_mm(case: Case) -> bool | str:
    act = _act(case)
    if isinstance(act, str):
        return act
    verdict = accepts_float8(case.spec, act.spec)
    if verdict is not True:
        return verdict
    if len(case.shape) != 2 or _is_per_row(case.spec, case.shape) is None:
        return "needs a 2-d weight with one scale per row or per tensor"
    if act.spec.block not in (None, (-1,)):
        return "needs one activation scale per token or per tensor"
    per_row = case.spec.block is not None or act.spec.block is not None
    return _within(LIMITS["rows" if per_row else "tensor"], case)


def accepts_float8(weight: QuantSpec, act: QuantSpec) -> bool | str:
    """True, or why the codes of these two specs are no operands of a float8 product."""
    if any(spec.format not in (E4M3, E5M2) for spec in (weight, act)):
        return "needs float8 on both sides"
    if weight.format is act.format is E5M2:
        return "one side must be e4m3"
    return (_plain(weight) and _plain(act)) or "needs plain scales"


def scaled_mm(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """y = (qx @ qw.T) * sx * sw + bias. Hopper's tensor cores add float8 products with fewer bits than float32.

    x: [.., K]; w: [N, K] with one scale, or one per row; as the input's. Mixed, both are given per row.
    """
    n, k = w._codes.shape
    if not x.numel():
        return _no_rows(x, n)
    codes = aligned(w._codes, "codes", (torch.float8_e4m3fn, torch.float8_e5m2), (n, k), x.device)
    assert w._scale is not None
    assert w.act is not None
    q = quantized(rows(x, k, FLOATS, x.device), w.act, w.act_scale, w.act_zero_point)
    return _biased(float8_product(q, codes, w._scale, bias, x.dtype), None, x)


def float8_product(q: Parts, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y [M, N] in dtype of quantized inputs [M, K] and the codes [N, K] and scales of a weight."""
    n = codes.shape[0]
    sx, sw = q.scale.float(), scale.float()
    if sx.numel() > 1 or sw.numel() > 1:
        sx, sw = _expanded(sx, (q.codes.shape[0], 1)), _expanded(sw.reshape(1, -1), (1, n))
    else:
        sx, sw = sx.reshape(()), sw.reshape(())
    # the op adds a bias of the result's dtype, but none to float32 results
    fused = bias if bias is not None and bias.dtype is dtype is not torch.float32 else None
    y = torch._scaled_mm(
        q.codes.contiguous(), codes.t(), sx, sw, bias=vector(fused, "bias", n, FLOATS, codes.device), out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return y if bias is None or fused is bias else (y + bias).to(dtype)


def _expanded(scale: Tensor, shape: tuple[int, int]) -> Tensor:
    return scale if scale.shape == shape else scale.reshape(1, 1).expand(shape).contiguous()


# -- MX and NVFP4 ------------------------------------------------------------------------------------------------------


def _accepts_blocks(case: Case) -> bool | str:
    act = _act(case)
    if isinstance(act, str):
        return act
    verdict = fits_blocks(case.spec, case.shape)
    if verdict is not True:
        return verdict
    if act.spec.block is None or len(act.spec.block) != 1:
        return "needs activations in the blocks of the weight"
    for name, same in (("mx", is_mx), ("nvfp4", is_nvfp4)):
        if same(case.spec):
            return _within(LIMITS[name], case) if same(act.spec) else f"needs {name} activations, as the weight is"
    return "needs MX or NVFP4 on both sides"


def block_scaled_mm(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """y = quantize(x) @ w.T + bias, scales applied per block by the tensor cores. x: [.., K]; w: [N, K].

    The float32 scales that NVFP4 has per tensor are applied to the result, in float32.
    """
    spec, scale = w.spec, w._scale
    n, k = w.stored_shape
    if not x.numel():
        return _no_rows(x, n)
    assert isinstance(scale, QT)
    assert w.act is not None
    q = encode_activation(rows(x, k, FLOATS, x.device), w.act, w.act_scale, w.act_zero_point)
    outer: Any = q.scale
    a, b = (_operand(codes, spec) for codes in (block_codes(q.codes, w.act.spec), w._codes))
    kind = torch.float8_e8m0fnu if is_mx(spec) else torch.float8_e4m3fn
    sx = tiled_scales(outer.codes.view(torch.uint8)).view(kind)
    y = torch._scaled_mm(a, b.t(), sx, scale._codes.view(kind), out_dtype=torch.bfloat16)
    whole = [s for s in (outer.scale, scale._scale) if s is not None]
    for s in whole:
        y = y.float() * s.float().reshape(())
    return _biased(y, bias, x)


def _operand(codes: Tensor, spec: QuantSpec) -> Tensor:
    return codes.view(torch.float4_e2m1fn_x2) if spec.format is E2M1 else codes


# -- int4 weights ------------------------------------------------------------------------------------------------------


def _accepts_int4(case: Case) -> bool | str:
    if case.act is not None:
        return "the activation is quantized"
    verdict = fits_int4(case.spec, case.shape)
    return verdict if verdict is not True else _within(LIMITS["int4"], case)


def int4_mm(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """y = x @ w.T + bias in bfloat16 with float32 sums. x: [.., K], zero-padded to whole groups; w: [N, K]."""
    words, scale = w._codes, w._scale
    assert scale is not None
    n, k = w.stored_shape[0], blocks.padded(w.spec.block, w.stored_shape)[1]
    if not x.numel():
        return _no_rows(x, n)
    words = aligned(words, "codes", torch.int32, words.shape, x.device)
    flat = rows(x, x.shape[-1], (torch.bfloat16,), x.device)
    if x.shape[-1] != k:
        flat = F.pad(flat, (0, k - x.shape[-1]))
    y = torch.ops.aten._weight_int4pack_mm.default(flat, words, k // scale.shape[0], scale)
    return _biased(y, bias, x)


# -- experts -----------------------------------------------------------------------------------------------------------


def _accepts_experts(case: Case) -> bool | str:
    act = _act(case)
    if isinstance(act, str):
        return act
    verdict = accepts_float8(case.spec, act.spec)
    if verdict is not True:
        return verdict
    if case.spec.format is not E4M3 or act.spec.format is not E4M3:
        return "needs e4m3 on both sides"
    if len(case.shape) != 3 or case.spec.block is None or not _is_per_row(case.spec, case.shape):
        return "needs weights [experts, N, K] with one scale per row"
    if act.mode != "dynamic" or act.spec.block != (-1,):
        return "needs dynamic activations with one scale per token"
    return _within(LIMITS["experts"], case)


def _grouped(x: Tensor, w: QT, ends: Tensor | None) -> Tensor:
    experts, n, k = w._codes.shape
    codes = aligned(w._codes, "codes", torch.float8_e4m3fn, (experts, n, k), x.device)
    assert w._scale is not None
    assert w.act is not None
    q: Parts = encode_activation(x, w.act, w.act_scale, w.act_zero_point)
    sx = q.scale.float().reshape(x.shape[:-1]).contiguous()
    sw = w._scale.float().reshape(experts, n).contiguous()
    return torch._scaled_grouped_mm(
        q.codes.contiguous(), codes.transpose(1, 2), sx, sw, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def experts_bmm(x: Tensor, w: QT, bias: Tensor | None = None) -> Tensor:
    """y[e] = quantize(x[e]) @ w[e].T. x: [E, M, K]; w: [E, N, K]."""
    return _grouped(x.contiguous(), w, None) if x.numel() else _no_rows(x, w.stored_shape[1])


def experts_grouped_mm(x: Tensor, w: QT, ends: Tensor) -> Tensor:
    """y[ends[e-1]:ends[e]] = x[ends[e-1]:ends[e]] @ w[e].T. x: [T, K], w: [E, N, K]; rows after the last end are 0."""
    if not x.numel():
        return _no_rows(x, w.stored_shape[1])
    y = _grouped(x.contiguous(), w, ends)
    unused = (
        torch.arange(x.shape[0], dtype=torch.int64, device=x.device) >= ends[-1]
    )  # on the device: no wait for the CPU
    return y.masked_fill_(unused[:, None], 0)


# Names of rows, in the order of the table; rank 30: as fast as the device allows; 15: below kernels that fuse more.
_ROWS: tuple[tuple[str, str, Callable[..., Tensor], Callable[[Case], bool | str], str, str, int, str], ...] = (
    ("linear", "torch_scaled_mm", scaled_mm, accepts_scaled_mm, "tensor", "plain", 30, "bfloat16"),
    ("linear", "torch_scaled_mm_blocks", block_scaled_mm, _accepts_blocks, "mx", BLOCK_TILES.name, 30, "bfloat16"),
    ("linear", "torch_int_mm_gpu", int_mm, _accepts_int_mm, "int8", "plain", 15, "float32"),
    ("linear", "torch_int4pack_gpu", int4_mm, _accepts_int4, "int4", INT4_TILES.name, 15, "bfloat16"),
    ("bmm", "torch_scaled_grouped_mm", experts_bmm, _accepts_experts, "experts", "plain", 20, "bfloat16"),
)
for _op, _name, _run, _accept, _limits, _layout, _rank, _tolerance in _ROWS:
    _grouped_run = experts_grouped_mm if _op == "bmm" else None
    register_kernel(
        Kernel(_op, _name, _run, _accept, LIMITS[_limits].devices, _layout, _rank, _tolerance, grouped=_grouped_run)
    )
