"""Inputs quantized in one pass on a GPU: the launcher of quantize_kernel.py.

As :func:`pennyweight.kernels.activation.encode_activation`, bit for bit what it gives on a CPU. torch's own ops read
and write an input about ten times for that, which costs more than the product that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import E4M3, E5M2
from ...core.numerics import Parts
from ...core.qparams import scale_floor
from ...core.spec import ActivationSpec
from ...core.tracing import plain_tensors
from .. import activation, gpu_arguments
from ..activation import static_params
from ..target import capability, target_of
from . import self_test_verdict
from .launch import Launcher

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cuda:sm_80+", "hip")
WIDEST = 16384  # columns of a row that one program holds in registers
_STEP = 4096  # columns per step of longer rows
_CODES = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}  # mantissa bits, exponent bias, greatest code


@dataclass(frozen=True, eq=False)  # one object per case, see static_of: its hash is needed at each launch
class Static:
    """What the kernel knows of an ActivationSpec and an input dtype while it is compiled."""

    kind: str  # "int" or "float"
    params: str  # "row", "range" or "given"
    divisor: float
    lo: float
    hi: float
    mantissa: int
    bias: int
    last: int
    zero_point: bool
    floor: float
    limit: float
    code_dtype: torch.dtype
    dtype: torch.dtype


def family(act: ActivationSpec) -> str:
    """The family of kernels that quantizes to these numbers, as in self_test_verdict.FAMILIES: integers and
    floats are rounded by different instructions."""
    return "quantize_int" if act.spec.format.kind == "int" else "quantize_float"


def accepts(act: ActivationSpec, dtype: torch.dtype) -> bool | str:
    """True, or why the kernel does not quantize inputs of that dtype so."""
    found = static_of(act, dtype)
    return found if isinstance(found, str) else True


@lru_cache(maxsize=1024)
def static_of(act: ActivationSpec, dtype: torch.dtype) -> Static | str:
    """The static properties of an activation that the kernel supports, or why it does not."""
    spec, f = act.spec, act.spec.format
    if dtype not in FLOATS:
        return f"quantizes float32, bfloat16 and float16 inputs, not {str(dtype).removeprefix('torch.')}"
    if not (f.kind == "int" and f.lo < 0) and f not in _CODES:
        return f"quantizes inputs to signed integers, e4m3 or e5m2, not {f}"
    if spec.scale is not torch.float32 or spec.offset is not None or spec.mid:
        return "needs float32 scales without an offset"
    if spec.block not in (None, (-1,)):
        return "needs one activation scale per token or per tensor"
    if spec.zero_point and (f.kind != "int" or spec.zero_point_dtype is not f.code_dtype):
        return "needs integer inputs for zero points, and zero points in the range of the codes"
    rules = ("asymmetric",) if spec.zero_point else ("symmetric", "absmax")
    if act.mode == "dynamic" and act.rule is not None and act.rule not in rules:
        return f"chooses scales by {' or '.join(rules)}, not {act.rule}"
    integers = f.hi - f.lo if spec.zero_point else (f.hi - f.lo) / 2
    end = min(f.hi, -f.lo)
    divisor = integers if f.kind == "int" and act.rule != "absmax" else end
    with plain_tensors():  # numbers can be read in a trace and among fake tensors too
        ends = [scale_floor(dtype, spec, act.eps), torch.finfo(dtype).max]
        floor, limit = torch.tensor(ends, dtype=torch.float32, device="cpu").to(dtype).tolist()
    params = "given" if act.mode == "static" else "range" if spec.block is None else "row"
    codes = _CODES.get(f, (0, 0, 0))
    return Static(
        "int" if f.kind == "int" else "float", params, float(divisor), float(f.lo), float(f.hi), *codes,
        bool(spec.zero_point), floor, limit, f.code_dtype, dtype,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _launcher(
    static: Static, k: int, values: bool, norm: torch.dtype | None, per_row: bool, device: torch.device, target: str
) -> Launcher:
    """The kernel for rows of k columns. norm: dtype of the weight of an RMSNorm."""
    import triton.language as tl

    from . import quantize_kernel

    loop = k > WIDEST
    width = _STEP if loop else max(64, 1 << (k - 1).bit_length())
    hopper = capability(target) >= 90  # sm_89 has the conversion to e4m3 too, but in two roundings
    options = {
        "PARAMS": static.params, "KIND": static.kind, "DIVISOR": static.divisor, "LO": static.lo, "HI": static.hi,
        "MANTISSA": static.mantissa, "BIAS": static.bias, "LAST": static.last, "HAS_Z": static.zero_point,
        "VALUES": values, "NATIVE": hopper and static.code_dtype is torch.float8_e4m3fn and not values,
        "NORM": norm is not None, "PER_ROW": per_row, "LOOP": loop, "B": width,
        "EARLY": hopper and target.startswith("cuda"), "num_warps": min(16, max(1, width // 512)),
        "T": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[static.dtype],
    }  # fmt: skip
    return Launcher(lambda: quantize_kernel.quantize_rows, options)


def launch(
    x: Tensor, static: Static, given: tuple[Tensor, Tensor | None] | None = None, *, values: bool = False,
    norm: Tensor | None = None, eps: float = 0.0, target: str | None = None,
) -> Parts:  # fmt: skip
    """codes [M, K] and scale (zero point) [M, 1] or [1, 1] of checked arguments; with ``values`` the dequantized
    numbers in place of codes, without parameters.

    given         stored scale and zero point; norm, eps: of an RMSNorm before
    target        of x's device, by default
    """
    m, k = x.shape
    lo = hi = x
    if static.params == "range":
        lo, hi = torch.aminmax(x)
    if given is None:
        count = m if static.params == "row" else 1
        scale = x.new_empty((count, 1), dtype=torch.float32)
        zero = scale.new_empty((count, 1), dtype=torch.int8) if static.zero_point else None
    else:
        scale, zero = given
    out = torch.empty_like(x, dtype=static.dtype if values else static.code_dtype)
    flat = out.view(torch.uint8) if static.kind == "float" and not values else out
    target = target_of(x.device) if target is None else target
    per_row = static.params == "row" or scale.numel() > 1
    run = _launcher(static, k, values, None if norm is None else norm.dtype, per_row, x.device, target)
    tensors = (x, flat, scale, scale if zero is None else zero, lo, hi, x if norm is None else norm)
    run((m, 1, 1), tensors, (k, static.floor, static.limit, eps))
    return Parts(out) if values else Parts(out, scale, zero)


def _given(
    x: Tensor, static: Static, scale: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Checked stored parameters of a static activation, [1, 1] or [M, 1]; None if it is dynamic."""
    if static.params != "given":
        return None
    found = static_params(x, scale, zero_point)
    assert found.scale is not None
    shape = tuple(found.scale.shape)
    s = gpu_arguments.aligned(found.scale.float(), "act_scale", torch.float32, shape, x.device)
    if found.zero_point is None:
        return s, None
    zero = found.zero_point.to(torch.int8)
    return s, gpu_arguments.aligned(zero, "act_zero_point", torch.int8, shape, x.device)


def quantizer(
    act: ActivationSpec, dtype: torch.dtype, *, values: bool = False
) -> Callable[[Tensor, Tensor | None, Tensor | None], Parts]:
    """(x, stored scale, stored zero point) -> parts, as :func:`encode` for inputs of a dtype, with everything static
    precomputed; values: as :func:`fake_quantized`, as the codes."""
    static = static_of(act, dtype)
    assert isinstance(static, Static)

    def run(x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Parts:
        if x.numel():
            return launch(x, static, _given(x, static, scale, zero_point), values=values)
        return Parts(x.clone()) if values else activation.encode_activation(x, act, scale, zero_point)

    return run


def encode(x: Tensor, act: ActivationSpec, scale: Tensor | None = None, zero_point: Tensor | None = None) -> Parts:
    """Codes [M, K], scale and zero point ([M, 1], or [1, 1] for all rows) of an input.

    x           [M, K], contiguous, at a multiple of 16 bytes: see gpu_arguments.rows
    act         one that :func:`accepts` accepts
    scale, zero_point  stored parameters of a static activation

    Raises ArgumentError if stored parameters are missing or do not fit.
    """
    return quantizer(act, x.dtype)(x, scale, zero_point)


def fake_quantized(
    x: Tensor, act: ActivationSpec, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> Tensor:
    """x [M, K] quantized and dequantized, in its dtype. Arguments and errors as for :func:`encode`."""
    return quantizer(act, x.dtype, values=True)(x, scale, zero_point).codes


def rms_norm_encode(x: Tensor, weight: Tensor, eps: float, act: ActivationSpec) -> Parts:
    """Parts of rms_norm(x) weight, normalized in float32 and rounded once to x's dtype, under a dynamic activation.

    x: [M, K] as for :func:`encode`; weight: [K]. One pass for rows of up to 16384 columns on a GPU with proven kernels,
    else torch's ops. Its scales may differ from those of torch.nn.functional.rms_norm in the last place, because the
    sum of squares is added in another order.
    """
    static = static_of(act, x.dtype)
    if not isinstance(static, Static) or static.params != "row" or x.shape[1] > WIDEST or not usable(x, act):
        return activation.encode_activation(F.rms_norm(x, (x.shape[1],), weight, eps), act, None, None)
    floats = gpu_arguments.aligned(weight, "weight", FLOATS, (x.shape[1],), x.device)
    return launch(x, static, norm=floats, eps=eps)


def usable(x: Tensor, act: ActivationSpec) -> bool:
    """Whether the kernel quantizes this input: real memory on a device where it has proven itself."""
    return type(x) is Tensor and x.device.type == "cuda" and x.numel() > 0 and _proven(act, x.dtype, x.device)


@lru_cache(maxsize=1024)
def _proven(act: ActivationSpec, dtype: torch.dtype, device: torch.device) -> bool:
    target = target_of(device)
    return accepts(act, dtype) is True and _runs(target) and self_test_verdict.refusal(target, family(act)) is None


def _runs(target: str) -> bool:
    return target.startswith("hip:") or capability(target) >= 80


def quantized(x: Tensor, act: ActivationSpec, scale: Tensor | None, zero_point: Tensor | None) -> Parts:
    """As encode_activation: by the kernel where it is usable, else by torch's ops. x: [M, K], see :func:`encode`."""
    run = encode if usable(x, act) else activation.encode_activation
    return run(x, act, scale, zero_point)
