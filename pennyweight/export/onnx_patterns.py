"""Tables of ONNX patterns for quantized weights; the first that accepts wins.

A pattern computes the same as ``dequantize`` followed by float32; or, for inputs quantized to integers, the same
integer sums. Patterns do not depend on onnxruntime session settings. Exception: a bare DequantizeLinear before a MatMul
(default sessions fuse the pair into a product with 8-bit inputs), used only by ``style="qdq"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..core.tensor import AffineQuantizedTensor
from . import quantize_ops
from .codes_2d import CodeRows, packed, pad_columns
from .graph import Nodes

STYLES = ("auto", "matmulnbits", "qdq")
NBITS_BLOCKS = (16, 32, 64, 128, 256)  # supported by onnxruntime's MatMulNBits
# Two products of a uint8 and an int8 up to this sum within 16 bits, the accumulator of x86 without VNNI.
SAFE_INT8 = 64


@dataclass(frozen=True)
class OnnxCase:
    """A weight and the requested options.

    rows     None if it has none, with the reason in ``refused``
    shared   whether anything other than linear layers also uses it
    """

    name: str
    tensor: AffineQuantizedTensor
    rows: Any
    style: str = "auto"
    accuracy_level: int = 1
    shared: bool = False
    refused: str = ""

    @property
    def act(self) -> Any:
        return self.tensor.act


@dataclass(frozen=True)
class OnnxPattern:
    """One row.

    accepts    case -> True, or the reason for the rejection
    build      (nodes, case, x) -> y: x the input of the op, None for a weight alone
    tolerance  how close its result is to the reference's
    """

    name: str
    styles: tuple[str, ...]
    accepts: Callable[[OnnxCase], bool | str]
    build: Callable[[Nodes, OnnxCase, Any], Any]
    tolerance: str = "float32"


def _input(case: OnnxCase) -> bool | str:
    """Whether the activation quantization can be written."""
    return True if case.act is None else quantize_ops.refusal(case.act, case.rows.width) or True


# -- integer products ------------------------------------------------------------------------------------------------


def _accepts_integer(case: OnnxCase) -> bool | str:
    r, act = case.rows, case.act
    if act is None:
        return "its activation is not quantized"
    if r.format.kind != "int" or not r.format.signed or r.offset is not None or isinstance(r.zero, torch.Tensor):
        return "MatMulInteger needs symmetric signed integer weights"
    if r.zero or r.n_blocks > 1:
        return "MatMulInteger needs one scale per row of the weight"
    if act.spec.format.kind != "int" or (act.mode == "dynamic" and act.spec.block not in (None, (-1,))):
        return "MatMulInteger needs integer inputs with a scale per token or per tensor"
    return _input(case)


def _integer(n: Nodes, case: OnnxCase, x: Any) -> Any:
    """((qx - zx) @ qw.T) * sx * sw, with exact sums.

    Inputs are stored as 0 to 255, for which onnxruntime's kernels are optimized. Weights too, unless they are small:
    a product of uint8 and int8 saturates on CPUs without VNNI.
    """
    import onnx_ir as ir

    r = case.rows
    codes = r.codes.numpy()
    small = int(np.abs(codes.astype(np.int16)).max()) <= SAFE_INT8
    q = quantize_ops.quantized(n, x, case.tensor)
    a = n.cast(n.op("Add", q.codes, np.float32(128)), ir.DataType.UINT8)
    if case.shared or r.storage_bits < 8:
        b = n.op("Transpose", quantize_ops.unsigned_codes(n, r), perm=[1, 0])
        zero: Any = np.uint8(quantize_ops.unsigned_shift(r))
    elif small:
        b, zero = n.stored(f"{r.name}.codes", lambda: codes.T), np.int8(0)
    else:
        b, zero = n.stored(f"{r.name}.codes", lambda: (codes.astype(np.int16) + 128).astype(np.uint8).T), np.uint8(128)
    y = n.op("MatMulInteger", a, b, np.uint8(128), zero)
    if q.zero is not None:
        sums = codes.sum(1, dtype=np.int32)
        z = n.cast(q.zero, ir.DataType.INT32) if not isinstance(q.zero, np.generic) else q.zero.astype(np.int32)
        y = n.op("Sub", y, n.op("Mul", z, n.stored(f"{r.name}.sums", lambda: sums)))
    return n.op("Mul", n.op("Mul", n.floats(y), q.scale), _row_scale(n, r))


def _row_scale(n: Nodes, r: CodeRows) -> Any:
    """The scale of each output, [N], or one number."""
    return quantize_ops.scales(n, r) if r.one_scale else n.reshape(quantize_ops.scales(n, r), -1)


# -- weight only -----------------------------------------------------------------------------------------------------


def nbits_block(r: CodeRows) -> int | None:
    """A block size for which MatMulNBits supports these rows; None if there is none."""
    if r.n_blocks == 1:
        return next((b for b in NBITS_BLOCKS if b >= r.width), NBITS_BLOCKS[-1])
    return next((b for b in reversed(NBITS_BLOCKS) if r.block % b == 0), None)


def _accepts_nbits(case: OnnxCase) -> bool | str:
    r = case.rows
    if r.format.kind != "int":
        return f"MatMulNBits supports only integers, not {r.format}"
    if r.block not in NBITS_BLOCKS:
        return f"MatMulNBits needs blocks of {NBITS_BLOCKS} along a row, but the weight has {r.block}"
    if case.style == "auto" and r.storage_bits != 4:
        return f"MatMulNBits has no fast path for {r.storage_bits} bits in float32"
    if r.storage_bits == 1:
        return "MatMulNBits supports only 2, 4 or 8 bits"
    return _input(case)


def _nbits(n: Nodes, case: OnnxCase, x: Any) -> Any:
    r, bits = case.rows, case.rows.storage_bits
    rank, x = len(x.shape), quantize_ops.rounded(n, x, case.tensor)
    shift = quantize_ops.unsigned_shift(r)
    zero: Any = None
    if isinstance(r.zero, torch.Tensor) or r.zero + shift != 1 << (bits - 1):  # the default is the middle
        zeros = (r.zeros() + shift).to(torch.uint8).expand(r.height, r.n_blocks).numpy()
        zero = n.stored(f"{r.name}.zero_points", lambda: packed(pad_columns(zeros, 8 // bits), bits))
    y = n.op(
        "MatMulNBits", x, quantize_ops.code_bytes(n, r), quantize_ops.scales(n, r),
        *([] if zero is None else [zero]),
        domain="com.microsoft", K=r.width, N=r.height, bits=bits, block_size=r.block,
        accuracy_level=case.accuracy_level,
    )  # fmt: skip
    return y if r.offset is None else n.op("Add", y, _offset_product(n, r, x, rank))


def _offset_product(n: Nodes, r: CodeRows, x: Any, rank: int) -> Any:
    """The contribution of real offsets: (sum of x over each block) @ offset.T."""
    more = r.n_blocks * r.block - r.width
    if more:
        ends, axes = np.array([0, more], np.int64), np.array([-1], np.int64)
        x = n.op("Pad", x, ends, np.float32(0), axes)
    sums = n.op("ReduceSum", n.reshape(x, *[0] * (rank - 1), r.n_blocks, r.block), np.array([-1], np.int64), keepdims=0)
    return n.op("MatMul", sums, n.op("Transpose", quantize_ops.offsets(n, r), perm=[1, 0]))


def _decodable(case: OnnxCase) -> bool | str:
    return _input(case)


def _product(n: Nodes, x: Any, w: Any) -> Any:
    return n.op("MatMul", x, n.op("Transpose", w, perm=[1, 0]))


def _decoded(n: Nodes, case: OnnxCase, x: Any) -> Any:
    return _product(n, quantize_ops.rounded(n, x, case.tensor), quantize_ops.values(n, case.rows))


def _float32(n: Nodes, case: OnnxCase) -> Any:
    return n.stored(f"{case.name}.float32", lambda: case.tensor.dequantize(torch.float32).numpy())


def _accepts_dq(case: OnnxCase) -> bool | str:
    r = case.rows
    if r.format.kind != "int" and not r.format.native_float:
        return f"DequantizeLinear supports only integers and float8, not {r.format}"
    return _input(case)


def _accepts_dq_alone(case: OnnxCase) -> bool | str:
    return _accepts_dq(replace(case, tensor=case.tensor.with_(act=None)))


def _dq(n: Nodes, case: OnnxCase, x: Any) -> Any:
    return _product(n, quantize_ops.rounded(n, x, case.tensor), quantize_ops.dequantize_linear(n, case.rows))


def _accepts_qdq(case: OnnxCase) -> bool | str:
    act = case.act
    if act is None or act.mode != "static" or act.spec.format.bits != 8 or act.spec.format.kind != "int":
        return "QuantizeLinear needs static int8 inputs"
    return _accepts_dq(case)


def _qdq(n: Nodes, case: OnnxCase, x: Any) -> Any:
    w = case.tensor
    assert w.act_scale is not None
    zero = np.int8(0 if w.act_zero_point is None else w.act_zero_point.item())
    how = np.float32(w.act_scale.item()), zero
    x = n.op("DequantizeLinear", n.op("QuantizeLinear", x, *how), *how)
    return _product(n, x, quantize_ops.dequantize_linear(n, case.rows))


ANY = STYLES
NEVER_QDQ = ("auto", "matmulnbits")
LINEAR = (
    OnnxPattern("QuantizeLinear + MatMul", ("qdq",), _accepts_qdq, _qdq, "one step of an input's code, at ties"),
    OnnxPattern("MatMulInteger", ANY, _accepts_integer, _integer, "equal integers"),
    OnnxPattern("MatMulNBits", NEVER_QDQ, _accepts_nbits, _nbits),
    OnnxPattern("DequantizeLinear + MatMul", ("qdq",), _accepts_dq, _dq, "float32, with graph optimizations off"),
    OnnxPattern("decode + MatMul", ANY, _decodable, _decoded),
)
VALUES = (
    OnnxPattern(
        "DequantizeLinear", ("qdq",), _accepts_dq_alone, lambda n, c, x: quantize_ops.dequantize_linear(n, c.rows),
        "exact",
    ),
    OnnxPattern("decode", ANY, lambda c: True, lambda n, c, x: quantize_ops.values(n, c.rows), "exact"),
)  # fmt: skip
INPUT = (OnnxPattern("quantized input", ANY, _input, lambda n, c, x: quantize_ops.rounded(n, x, c.tensor)),)
EMBEDDING = (
    OnnxPattern("Gather + decode", ANY, lambda c: True, lambda n, c, x: quantize_ops.lookup(n, c.rows, x), "exact"),
)
TABLES = {"linear": LINEAR, "values": VALUES, "convolution": INPUT, "embedding": EMBEDDING}


# With allow_float: float32 weights, and unquantized inputs.
FLOAT = {
    use: OnnxPattern("float32", ANY, lambda c: True, build, "exact")
    for use, build in {
        "linear": lambda n, c, x: _product(n, x, _float32(n, c)),
        "values": lambda n, c, x: _float32(n, c),
        "convolution": lambda n, c, x: x,
        "embedding": lambda n, c, x: n.op("Gather", _float32(n, c), x, axis=0),
    }.items()
}


def choose(case: OnnxCase, use: str) -> OnnxPattern | list[str]:
    """The pattern for a use, or the reasons why none applies, a sentence for each."""
    said = [case.refused] if case.refused else []
    for form in () if said else TABLES[use]:
        verdict = form.accepts(case) if case.style in form.styles else f'is for style="{form.styles[0]}"'
        if verdict is True:
            return form
        said.append(f"{form.name}: {verdict}")
    return said
