"""8-bit kernels based on torch's own CPU ops.

``torch._int_mm`` multiplies int8 by int8 into int32 for every shape, but is correct only if oneDNN finds VNNI.
``aten._weight_int8pack_mm`` is fast only in bfloat16 (float32 and float16 take a scalar loop) and reads past its
buffers if K is not a multiple of 16, so it is not used in those cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.formats import INT7, INT8
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import plain_tensors
from .activation import encode_activation
from .table import Case, Kernel, register_kernel

# Above this many rows, casting the codes and calling the float product is faster (2048x2048, two threads: 0.9x at 16
# rows, 2.4x at 128 rows).
PACK_ROWS = 15
ALIGNMENT = 64  # bytes of an AVX-512 register; alignment of torch's allocator


def _row_int8(spec: QuantSpec, shape: tuple[int, ...]) -> bool | str:
    if spec.format not in (INT7, INT8) or spec.zero_point or spec.offset is not None or spec.mid:
        return "needs symmetric int8 (or 7-bit) weights"
    if not isinstance(spec.scale, torch.dtype):
        return "its scale is itself quantized"
    if spec.block is not None and (len(spec.block) > 1 or 0 < spec.block[0] < shape[-1]):
        return f"needs one scale per row or per tensor, the weight has one per block {list(spec.block)}"
    return len(shape) == 2 or "needs a 2-d weight"


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _scaled(y: Tensor, scale: Any, bias: Tensor | None, x: Tensor) -> Tensor:
    """y * scale + bias in float32, rounded once to x's dtype. y: [M, N]; scale: one per row of the weight, or one."""
    y = y * scale.float().reshape(-1)
    y = (y if bias is None else y + bias).to(x.dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


# -- both operands int8 ----------------------------------------------------------------------------------------------


def constant_while_tracing(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Same as torch.compiler.assume_constant_result, without importing torch._dynamo."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@constant_while_tracing
@lru_cache(maxsize=1)
def int_mm_saturates() -> bool:
    """Whether ``torch._int_mm`` gives wrong sums here: without VNNI, oneDNN adds pairs of products in 16 bits."""
    with plain_tensors():
        a = torch.full((2, 128), 127, dtype=torch.int8, device="cpu")
        return bool((torch._int_mm(a, a.new_full((16, 128), 127).t()) != 127 * 127 * 128).any())


def _accepts_both(case: Case) -> bool | str:
    verdict = _row_int8(case.spec, case.shape)
    if verdict is not True:
        return verdict
    act = case.act
    if act is None:
        return "weight-only: the activation is not quantized"
    spec = act.spec
    if (
        spec.format not in (INT7, INT8)
        or spec.mid
        or spec.offset is not None
        or not isinstance(spec.scale, torch.dtype)
    ):
        return "needs int8 activations with a plain scale"
    if act.mode == "dynamic" and spec.block not in ((-1,), None):
        return "needs one activation scale per token or per tensor"
    return True


def _accepts_int_mm(case: Case) -> bool | str:
    verdict = _accepts_both(case)
    if verdict is not True or not int_mm_saturates():
        return verdict
    return "torch._int_mm saturates on this CPU (no VNNI, or oneDNN restricted to an older ISA): its sums are wrong"


def _int8_int8(x: Tensor, w: Any, bias: Tensor | None, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """y = (qx @ qw.T - zx * sum_k qw) * sx * sw + bias, scaled in float32. x: [.., K]; w: [N, K]."""
    q = encode_activation(_flat(x), w.act, w.act_scale, w.act_zero_point)
    total = product(q.codes, w.codes.t())
    if q.zero_point is not None:
        total = total - q.zero_point.to(torch.int32) * w.codes.sum(-1, dtype=torch.int32)
    return _scaled(total * q.scale.float(), w.scale, bias, x)


def int8_int8(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """Sums exact in int32."""
    return _int8_int8(x, w, bias, _int_mm)


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] in int32. Works around two bugs of torch 2.13: zeros for a single row with strides (1, 1)
    (an unsqueezed, transposed vector), avoided by a view; uninitialized memory for K = 1, computed separately."""
    if a.shape[1] == 1:
        return a.to(torch.int32) * b.to(torch.int32)
    return torch._int_mm(a.reshape(-1).view(a.shape), b)


def int8_int8_float(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float32 sums of exact products; used if :func:`int8_int8` would be wrong."""
    return _int8_int8(x, w, bias, lambda a, b: torch.mm(a.float(), b.float()))


# -- weight only -----------------------------------------------------------------------------------------------------


def _accepts_cast(case: Case) -> bool | str:
    return "the activation is quantized" if case.act is not None else _row_int8(case.spec, case.shape)


def int8_cast(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = (x @ qw.T) * sw + bias: casts the codes and applies the scale to the result. x: [.., K].

    float16 inputs are computed in float32, because sums of unscaled codes overflow float16.
    """
    wide = x.float() if x.dtype is torch.float16 else x
    y = F.linear(_flat(wide), w.codes.to(wide.dtype))
    return _scaled(y, w.scale, bias, x)


def _accepts_pack(case: Case) -> bool | str:
    verdict = _accepts_cast(case)
    if verdict is not True:
        return verdict
    if case.dtype is not torch.bfloat16:
        return "fast in bfloat16 only"
    return not case.shape[-1] % 16 or f"reads out of bounds unless K is a multiple of 16, K is {case.shape[-1]}"


@lru_cache(maxsize=256)
def _ones(n: int) -> Tensor:
    with plain_tensors():
        return torch.ones(n, dtype=torch.bfloat16, device="cpu")


def int8_pack(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """As :func:`int8_cast`, fused. The float32 scale is applied afterwards, because the op would round it to bfloat16.

    The aten op crashes on unaligned data: a slice of a buffer, codes mapped from a file at an odd offset.
    """
    codes = w.codes.contiguous()
    if x.numel() > PACK_ROWS * x.shape[-1] or codes.data_ptr() % ALIGNMENT:
        return int8_cast(x, w, bias)
    flat = _flat(x).contiguous()
    if flat.data_ptr() % ALIGNMENT:
        flat = flat.clone()
    y = torch.ops.aten._weight_int8pack_mm.default(flat, codes, _ones(codes.shape[0]))
    return _scaled(y, w.scale, bias, x)


# Three balanced limbs of base 128 hold 22 bits, about the precision of float32 sums; the top one spans a signed byte.
DIGIT, TOP = 128.0, 127.0
# Weights below this size are cast: 384x384 ran at 0.7x to 1.6x of float with limbs and at 0.6x to 0.8x with casting,
# and 1536x384 is even. From 1024x1024 to 4096x4096, 1 to 2048 rows, two threads: limbs run at 1.1x to 2.7x of float,
# casting mostly at 0.6x to 1x.
DIGIT_WEIGHTS = 1 << 20


def _accepts_digits(case: Case) -> bool | str:
    verdict = _accepts_cast(case)
    if verdict is not True:
        return verdict
    if case.dtype not in (torch.float32, torch.float16):
        return "for float32 and float16 inputs: bfloat16 has faster kernels, float64 more bits than three limbs"
    if case.shape[0] * case.shape[1] < DIGIT_WEIGHTS:
        return f"casting is faster for a weight of {case.shape[0] * case.shape[1]} elements"
    if case.shape[-1] * 127 * 127 >= 1 << 31:
        return f"sums of {case.shape[-1]} products may overflow int32"
    return not int_mm_saturates() or "torch._int_mm saturates on this CPU: its sums are wrong"


def int8_digits(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """As :func:`int8_cast`, in integers: x = s * (128**2 * d2 + 128 * d1 + d0) per token, s = absmax / (127 * 128**2).

    The int8 limbs d2, d1, d0 are three rows of one product, whose sums are exact in int32. So codes are read as bytes
    and a row never depends on other rows. x is rounded to 2**-22 of the largest magnitude of its token.
    """
    flat, codes = _flat(x).float(), w.codes.t()
    scale = (
        flat.abs().amax(-1, keepdim=True).div_(TOP * DIGIT * DIGIT).clamp_(torch.finfo(torch.float32).smallest_normal)
    )
    rest = (flat / scale).round_()
    high = (rest / (DIGIT * DIGIT)).round_()
    rest = rest.sub_(high, alpha=DIGIT * DIGIT)
    middle = (rest / DIGIT).round_()
    rest = rest.sub_(middle, alpha=DIGIT)
    limbs = torch.stack([high, middle, rest]).to(torch.int8)
    if flat.shape[0] == 1:  # oneDNN's single-row kernel is fast enough to justify three calls
        sums = [torch._int_mm(d, codes) for d in limbs]
    else:
        sums = torch._int_mm(limbs.flatten(0, 1), codes).unflatten(0, (3, -1)).unbind()
    y = (sums[0].float() * (DIGIT * DIGIT)).add_(sums[1], alpha=DIGIT).add_(sums[2])
    return _scaled(y.mul_(scale), w.scale, bias, x)


for _name, _run, _accept, _devices, _rank, _tolerance in (
    ("torch_int_mm", int8_int8, _accepts_int_mm, ("cpu",), 20, "float32"),
    ("torch_int8_float", int8_int8_float, _accepts_both, None, 10, "float32"),
    ("torch_int_mm_digits", int8_digits, _accepts_digits, ("cpu",), 20, "fixed22"),
    ("torch_int8pack", int8_pack, _accepts_pack, ("cpu",), 20, "bfloat16"),
    ("torch_int8_cast", int8_cast, _accepts_cast, None, 10, "float32"),
):
    register_kernel(
        Kernel("linear", _name, _run, _accept, _devices, "plain", _rank, _tolerance,
               row_independent=_name in ("torch_int_mm", "torch_int_mm_digits"))  # sums of integers are exact
    )  # fmt: skip
