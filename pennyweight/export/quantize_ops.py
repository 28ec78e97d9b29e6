"""Quantizes activations and dequantizes stored codes in the graph, with standard ONNX ops in float32.

Dequantizing is bit-identical to ``dequantize``. Codes are stored in a byte initializer [R, blocks, bytes of a block],
unsigned, the first code lowest: the layout of MatMulNBits, so that an embedding tied to a linear layer is stored once.

Activations follow the arithmetic of ``core.qparams`` and ``core.numerics``. DynamicQuantizeLinear is not used: it
rounds x / scale where torchao and this package round x * (1 / scale), and has a different code range for its zero
point, so some codes would differ by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.qparams import scale_floor
from ..core.spec import ActivationSpec
from ..core.tensor import AffineQuantizedTensor
from .codes_2d import CodeRows, packed, pad_columns, unsigned
from .graph import Nodes

# -- stored codes ------------------------------------------------------------------------------------------------------


def _bits(r: CodeRows) -> int:
    """Bits per stored code: 8 if blocks would not end at a byte boundary."""
    bits = r.storage_bits
    return bits if r.n_blocks == 1 or r.block * bits % 8 == 0 else 8


def _stride(r: CodeRows) -> int:
    """Stored codes per block, including padding."""
    per = 8 // _bits(r)
    return r.block if r.n_blocks > 1 else -(-r.block // per) * per


def code_bytes(n: Nodes, r: CodeRows) -> Any:
    """uint8 [R, blocks, bytes of a block]."""
    bits, stride = _bits(r), _stride(r)

    def make() -> np.ndarray:
        codes = r.codes.view(torch.uint8).numpy() if r.format.native_float else unsigned(r)[0]
        return packed(pad_columns(codes, stride), bits).reshape(r.height, r.n_blocks, -1)

    return n.stored(f"{r.name}.codes", make)


def scales(n: Nodes, r: CodeRows) -> Any:
    """float32 [R, blocks] or [1, 1]."""
    return n.stored(f"{r.name}.scale", r.scale.numpy)


def offsets(n: Nodes, r: CodeRows) -> Any:
    assert r.offset is not None
    return n.stored(f"{r.name}.offset", r.offset.numpy)


def _number_table(r: CodeRows) -> np.ndarray | None:
    """Values by code, for formats where the code is not the value."""
    if r.format.native_float:
        return (
            torch.arange(256, dtype=torch.int64, device="cpu").to(torch.uint8).view(r.format.code_dtype).float().numpy()
        )
    return None if r.format.kind == "int" else np.array(r.format.values, np.float32)


def _unpacked(n: Nodes, r: CodeRows, codes: Any, lead: int) -> Any:
    """Codes [*lead, blocks, codes of a block] of bytes [*lead, blocks, bytes]: uint8, or uint32 where they were packed.

    Shifted in 32 bits: OpenVINO (2026.4) computes uint8 shifts in such a graph incorrectly, without an error.
    """
    import onnx_ir as ir

    bits = _bits(r)
    if bits == 8:
        return codes
    places = np.arange(0, 8, bits, dtype=np.uint32)
    last = n.cast(n.op("Unsqueeze", codes, np.array([-1], np.int64)), ir.DataType.UINT32)
    last = n.op("BitwiseAnd", n.op("BitShift", last, places, direction="RIGHT"), np.uint32((1 << bits) - 1))
    return n.reshape(last, *[0] * lead, r.n_blocks, _stride(r))


def unsigned_codes(n: Nodes, r: CodeRows) -> Any:
    """uint8 [R, K], one code per element."""
    import onnx_ir as ir

    x = _joined(n, r, _unpacked(n, r, code_bytes(n, r), 1), 1)
    return x if _bits(r) == 8 else n.cast(x, ir.DataType.UINT8)


def _joined(n: Nodes, r: CodeRows, x: Any, lead: int) -> Any:
    """[*lead, K] of [*lead, blocks, codes of a block]."""
    x = n.reshape(x, *[0] * lead, r.n_blocks * _stride(r))
    return x if r.n_blocks * _stride(r) == r.width else n.cut_last(x, 0, r.width)


def _decoded(n: Nodes, r: CodeRows, codes: Any, pick: Any, lead: int) -> Any:
    """Floats [*lead, K] of bytes [*lead, blocks, bytes]; pick(part) gives the part [*lead, blocks] of those rows."""
    x = _numbers(n, r, _unpacked(n, r, codes, lead))
    x = _scaled(n, r, x, lambda p: n.op("Unsqueeze", pick(p), np.array([-1], np.int64)))
    return _joined(n, r, x, lead)


def _numbers(n: Nodes, r: CodeRows, codes: Any) -> Any:
    """Unsigned codes as their values; integer codes without the zero point."""
    import onnx_ir as ir

    table = _number_table(r)
    if table is None:
        return n.floats(codes)
    return n.op("Gather", n.stored(f"pennyweight.numbers.{r.format}", lambda: table), n.cast(codes, ir.DataType.INT32))


def _scaled(n: Nodes, r: CodeRows, x: Any, spread: Any) -> Any:
    """(x - zero) * scale + offset, each once and in this order, as in the reference."""
    shift = unsigned_shift(r)
    if isinstance(r.zero, torch.Tensor):
        zeros = (r.zero + shift).to(torch.uint8).numpy()
        x = n.op("Sub", x, n.floats(spread(n.stored(f"{r.name}.zero_point", lambda: zeros))))
    elif r.zero + shift:
        x = n.op("Sub", x, np.float32(r.zero + shift))
    x = n.op("Mul", x, spread(scales(n, r)))
    return x if r.offset is None else n.op("Add", x, spread(offsets(n, r)))


def unsigned_shift(r: CodeRows) -> int:
    """The value :func:`rows.unsigned` adds to codes."""
    return 1 << (r.storage_bits - 1) if r.format.kind == "int" and r.format.signed else 0


def values(n: Nodes, r: CodeRows) -> Any:
    """The whole weight, in its shape. By default onnxruntime computes it once, when it loads the file."""
    x = _decoded(n, r, code_bytes(n, r), lambda part: part, 1)
    return x if r.shape == (r.height, r.width) else n.reshape(x, *r.shape)


def lookup(n: Nodes, r: CodeRows, index: Any) -> Any:
    """Rows of the weight. Reads only the data of the requested rows."""
    lead = len(index.shape)

    def pick(part: Any) -> Any:
        return part if tuple(part.shape) == (1, 1) != (r.height, r.n_blocks) else n.op("Gather", part, index, axis=0)

    return _decoded(n, r, n.op("Gather", code_bytes(n, r), index, axis=0), pick, lead)


# -- DequantizeLinear ------------------------------------------------------------------------------------------------


def dequantize_linear(n: Nodes, r: CodeRows) -> Any:
    """The whole weight by DequantizeLinear (opset 21 if a row has several scales or codes are 4 bits)."""
    import onnx_ir as ir

    x, kind, small = r.codes, r.format, r.format.bits <= 4
    width = r.n_blocks * r.block
    dtypes = ir.DataType
    if kind.native_float:
        dtype = dtypes.FLOAT8E4M3FN if kind.code_dtype is torch.float8_e4m3fn else dtypes.FLOAT8E5M2
    elif small:
        dtype = dtypes.INT4 if kind.signed else dtypes.UINT4
    else:
        dtype = dtypes.INT8 if kind.signed else dtypes.UINT8

    def stored(numbers: np.ndarray) -> Any:
        if kind.native_float:
            return numbers.view(dtype.numpy())
        return _nibbles(numbers) if small else numbers.astype(dtype.numpy())

    raw = x.view(torch.uint8).numpy() if kind.native_float else x.numpy()
    codes = n.stored(f"{r.name}.dq_codes", lambda: stored(pad_columns(raw, width)), dtype)
    blocked = r.n_blocks > 1
    shape = () if r.one_scale else tuple(r.scale.shape) if blocked else (r.height,)
    full = r.scale.numpy() if r.one_scale or blocked else r.scale.expand(r.height, 1).contiguous().numpy()
    scale = n.stored(f"{r.name}.dq_scale", lambda: full.reshape(shape))
    given = [codes, scale]
    if isinstance(r.zero, torch.Tensor) or r.zero:
        zeros = r.zeros().expand(full.shape).contiguous().numpy().reshape(shape)
        given.append(n.stored(f"{r.name}.dq_zero_point", lambda: stored(zeros), dtype))
    how: dict[str, Any] = {"axis": 1, "block_size": r.block} if blocked else {} if r.one_scale else {"axis": 0}
    y = n.op("DequantizeLinear", *given, **how)
    if r.offset is not None:
        last = np.array([-1], np.int64)
        y = n.op("Add", n.reshape(y, 0, r.n_blocks, r.block), n.op("Unsqueeze", offsets(n, r), last))
        y = n.reshape(y, 0, width)
    if width != r.width:
        y = n.cut_last(y, 0, r.width)
    return y if r.shape == (r.height, r.width) else n.reshape(y, *r.shape)


def _nibbles(numbers: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """4-bit numbers packed two to a byte, in order over the whole array, and their shape."""
    flat = (numbers.astype(np.int16) & 15).astype(np.uint8).reshape(1, -1)
    return packed(pad_columns(flat, 2), 4).reshape(-1), numbers.shape


# -- activations -------------------------------------------------------------------------------------------------------

_RULES = (None, "symmetric", "asymmetric", "absmax")


class QuantizedInput(NamedTuple):
    """x ~ (codes - zero) * scale. codes and zero: integers (or float8 values) as float32; None: 0."""

    codes: Any
    scale: Any
    zero: Any


def refusal(act: ActivationSpec, width: int) -> str | None:
    """Why an activation cannot be quantized in a graph; None if it can. width: size of its last axis."""
    spec = act.spec
    if spec.scale is not torch.float32:
        return f"its activation scale is {spec.scale}; only float32 scales can be computed in a graph"
    if spec.offset is not None or spec.mid:
        return "its activation has a real offset or a constant zero point"
    if not (spec.format.native_float or (spec.format.kind == "int" and spec.format.signed)):
        return f"its activation is {spec.format}; only signed integers and float8 are supported"
    if act.mode == "static":
        return None if spec.block is None else "its static activation scale is not one number"
    if act.rule not in _RULES or (spec.zero_point and act.rule not in (None, "asymmetric")):
        return f"its activation scale is chosen by rule {act.rule!r}"
    block = spec.block
    if block is None or all(b == -1 for b in block):
        return None
    if len(block) == 1 and width % block[0] == 0:
        return None
    return f"its activation has blocks {list(block)}, which do not divide a row of {width}"


def quantized(n: Nodes, x: Any, w: AffineQuantizedTensor) -> QuantizedInput:
    """The codes of x. Blocks along its last axis are not split here: see :func:`rounded`."""
    act = w.act
    assert act is not None
    f, spec = act.spec.format, act.spec
    lo, hi = np.float32(f.lo), np.float32(f.hi)
    if act.mode == "static":
        assert w.act_scale is not None
        scale: Any = np.float32(w.act_scale.item())
        zero: Any = None if w.act_zero_point is None else np.float32(w.act_zero_point.item())
        up: Any = np.float32(1) / scale
    else:
        axes = np.arange(-len(x.shape if spec.block is None else spec.block), 0, dtype=np.int64)
        least = np.float32(scale_floor(torch.float32, spec, act.eps))
        zero = None
        if spec.zero_point:
            bottom = n.op("Min", n.op("ReduceMin", x, axes, keepdims=1), np.float32(0))
            top = n.op("Max", n.op("ReduceMax", x, axes, keepdims=1), np.float32(0))
            scale = n.op("Max", n.op("Div", n.op("Sub", top, bottom), hi - lo), least)
            zero = n.op("Clip", n.op("Sub", lo, n.op("Round", n.op("Div", bottom, scale))), lo, hi)
        else:
            largest = n.op("ReduceMax", n.op("Abs", x), axes, keepdims=1)
            scale = n.op("Max", n.op("Div", largest, np.float32(_reach(act))), least)
        # A true division: onnxruntime rewrites x * (1 / scale), with a constant 1, to x / scale, which changes codes;
        # and its Reciprocal need not round like a division.
        up = n.op("Div", n.op("Div", scale, scale), scale)
    if f.native_float:
        return QuantizedInput(_float8(n, n.op("Clip", n.op("Div", x, scale), lo, hi), f.code_dtype), scale, None)
    steps = n.op("Round", n.op("Mul", x, up))
    return QuantizedInput(n.op("Clip", steps if zero is None else n.op("Add", steps, zero), lo, hi), scale, zero)


def _reach(act: ActivationSpec) -> float:
    """The divisor of the absolute maximum for this rule."""
    f = act.spec.format
    if act.rule == "absmax":
        return min(f.hi, -f.lo)
    return (f.hi - f.lo) / 2 if f.kind == "int" else max(f.hi, -f.lo)


def _float8(n: Nodes, x: Any, dtype: torch.dtype) -> Any:
    import onnx_ir as ir

    kind = ir.DataType.FLOAT8E4M3FN if dtype is torch.float8_e4m3fn else ir.DataType.FLOAT8E5M2
    return n.floats(n.cast(x, kind))


def rounded(n: Nodes, x: Any, w: AffineQuantizedTensor) -> Any:
    """x as the op sees it: quantized and dequantized. x unchanged if its activation is not quantized."""
    if w.act is None:
        return x
    block, rank, width = w.act.spec.block, len(x.shape), x.shape[-1]
    grouped = w.act.mode == "dynamic" and block is not None and len(block) == 1 and block[0] != -1
    if grouped:
        assert block is not None
        x = n.reshape(x, *[0] * (rank - 1), width // block[0], block[0])
    q = quantized(n, x, w)
    y = n.op("Mul", q.codes if q.zero is None else n.op("Sub", q.codes, q.zero), q.scale)
    return n.reshape(y, *[0] * (rank - 1), width) if grouped else y
