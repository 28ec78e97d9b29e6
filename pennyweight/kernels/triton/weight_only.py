"""``linear`` on GPUs with quantized weights and float inputs: the rows of the kernel table, and their launcher.

One kernel (weight_only_kernel.py) serves one row of input to hundreds. From about a thousand rows the product is bound
by the matrix unit, so the weight is dequantized once, by a kernel at the rate of memory, and torch multiplies.

Inputs that the scheme quantizes are quantized and dequantized in one pass before the same kernel: the numbers are those
of the reference, and the product costs what it costs with float inputs. Weights and inputs that are both int8 or float8
have faster rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import blocks
from ...core.formats import E8M0, Format
from ...core.numerics import Parts
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...core.tracing import plain_tensors
from .. import gpu_arguments
from ..table import Bound, Case, Kernel, register_kernel
from ..target import target_of
from . import quantize, self_test_verdict, tiles, workspace
from .codes import DTYPES, Decoding, decoding
from .launch import Launcher
from .layout import LAYOUT, ROWS, Groups, columns, fits, groups
from .tiles import Tile

NAME = "triton_weight_only"
QUANTIZED_INPUT = "triton_quantized_input"
DEVICES = ("cuda:sm_80+", "hip")
_LAUNCHES = 1024  # numbers of rows of one weight whose launches are kept


@dataclass(frozen=True, eq=False)  # one object per case, see static_of: its hash is needed at each launch
class Static:
    """What the kernel knows of a weight while it is compiled."""

    n: int
    k: int
    tiles: int  # along k
    decoding: Decoding
    groups: Groups
    scale_kind: str  # "float", "e8m0" or "e4m3"
    zero_point: bool
    offset: bool
    outer: bool  # whether one more number multiplies all
    dtype: torch.dtype
    values: tuple[float, ...] | None  # of a fixed table

    @property
    def small(self) -> bool:
        return self.groups.small

    @property
    def columns(self) -> int:
        return columns(self.decoding)


class Operand(NamedTuple):
    """Checked parts of a weight. Those that it does not have are the codes: the kernel does not read them."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    offset: Tensor
    table: Tensor
    outer: Tensor
    perm: Tensor | None
    device: torch.device
    act_scale: Tensor | None = None
    act_zero_point: Tensor | None = None


@lru_cache(maxsize=4096)
def static_of(spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Static:
    """The static properties of a weight that layout "gpu" supports."""
    d = decoding(spec.format, spec.mid)
    assert isinstance(d, Decoding)
    whole = blocks.padded(spec.block, shape)
    g = groups(spec, whole, columns(d))
    assert isinstance(g, Groups)
    kind = "float"
    outer = g.kind == "tensor"
    if isinstance(spec.scale, QuantSpec):
        kind = "e8m0" if spec.scale.format is E8M0 else "e4m3"
        outer = spec.scale.scale is not None
    values = spec.format.values if d.kind == "table" and spec.format.kind == "table" else None
    count = -(-whole[1] // columns(d))
    flags = (bool(spec.zero_point), spec.offset is not None, outer)
    return Static(shape[0], shape[1], count, d, g, kind, *flags, dtype, values)


def table_words(values: Tensor, dtype: torch.dtype) -> Tensor:
    """16 numbers, rounded to dtype, as the kernel reads them: their low bytes, then their high bytes. int32 [8]."""
    rounded = torch.zeros(16, dtype=dtype, device=values.device)
    rounded[: values.numel()] = values.reshape(-1).to(dtype)
    return rounded.view(torch.uint8).reshape(16, 2).t().contiguous().reshape(-1).view(torch.int32)


@lru_cache(maxsize=256)
def _fixed_table(f: Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The table of a format; kept, because a copy to the device cannot be captured in a graph."""
    with plain_tensors():
        return table_words(torch.tensor(f.values, dtype=torch.float32, device=device), dtype)


def operand(static: Static, spec: QuantSpec, parts: Any) -> Operand:
    """The parts of a weight, checked for the kernel. Raises ArgumentError."""
    codes, device = parts.codes, parts.codes.device
    g, d = static.groups, static.decoding
    n, ct = blocks.padded(spec.block, (static.n, static.k))[0], static.tiles
    rt = -(-n // ROWS)
    codes = gpu_arguments.aligned(codes, "codes", torch.int32, (rt, ct, None, ROWS, 32), device, wide=True)
    per_group = {"row": (n,), "group": (rt, -(-ct // g.tiles), ROWS, g.width)}.get(g.kind)

    def numbers(part: Any, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        assert per_group is not None
        return gpu_arguments.aligned(part, name, dtypes, per_group, device, wide=True)

    floats = (torch.float32, torch.bfloat16, torch.float16)
    scale = zero = offset = outer = table = codes
    above = parts.scale.parts if isinstance(parts.scale, AffineQuantizedTensor) else parts.scale
    if isinstance(above, Parts):
        scale = numbers(above.codes, "scale", (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)).view(
            torch.uint8
        )
        if static.outer:
            outer = gpu_arguments.aligned(above.scale.reshape(-1), "scale of the scales", torch.float32, (1,), device)
    elif g.kind == "tensor":
        outer = gpu_arguments.aligned(above.reshape(-1), "scale", floats, (1,), device)
    elif above is not None:
        scale = numbers(above, "scale", floats)
    if static.zero_point:
        zero = numbers(parts.zero_point, "zero_point", (torch.uint8, torch.int8))
    if static.offset:
        offset = numbers(parts.offset, "offset", floats)
    if d.kind == "table":
        fixed = parts.table is None
        table = _fixed_table(spec.format, static.dtype, device) if fixed else table_words(parts.table, static.dtype)
    act = parts.act_scale, parts.act_zero_point  # checked with each input, because there may be one per row of it
    return Operand(codes, scale, zero, offset, table, outer, parts.perm, device, *act)


@lru_cache(maxsize=256)
def table_code(static: Static) -> tuple[str, ...]:
    """PTX that decodes each plane of a word by a table that is known while the kernel is compiled; none for others.

    With one operand, Triton moves the change of layout in front of it, see decode_kernel.py.
    """
    if static.values is None:
        return ("", "", "", "")
    with plain_tensors():
        values = torch.tensor(static.values, dtype=torch.float32, device="cpu")
        words = [word & 0xFFFFFFFF for word in table_words(values, static.dtype).tolist()]
    low, high = ([f"0x{word:08x}" for word in words[i : i + 4]] for i in (0, 4))
    lines = [".reg .b32 s, p, m, a, b, e0, e1, f0, f1;"]
    for half, out in ((0, "e"), (1, "f")):
        lines += [f"shr.u32 s, $1, {16 * half};", "and.b32 p, s, 0x8888;", "shr.u32 p, p, 3;", "and.b32 s, s, 0x7777;"]
        lines += ["mov.b32 m, 0xff00;", "prmt.b32 m, m, m, p;"]
        for i, table in enumerate((low, high)):
            for name, (x, y) in (("a", table[:2]), ("b", table[2:])):
                lines += [f"{{ .reg .b32 x, y; mov.b32 x, {x}; mov.b32 y, {y}; prmt.b32 {name}, x, y, s; }}"]
            lines += ["xor.b32 b, b, a;", "and.b32 b, b, m;", f"xor.b32 {out}{i}, a, b;"]
    found = []
    for plane in range(4):
        pick = "0x5140" if plane < 2 else "0x7362"
        tail = [f"prmt.b32 e0, e0, e1, {pick};", f"prmt.b32 f0, f0, f1, {pick};"]
        tail += [f"prmt.b32 $0, e0, f0, {'0x5410' if plane % 2 == 0 else '0x7632'};"]
        found.append("{ " + " ".join([*lines, *tail]) + " }")
    return tuple(found)


@lru_cache(maxsize=16384)
def _options(static: Static, tile: Tile, parts: int, bias: bool) -> dict[str, Any]:
    """The kernel's arguments that are known while it is compiled."""
    import triton.language as tl

    d, g = static.decoding, static.groups
    b0, b1, b2 = (*d.pieces, 0, 0)[:3]
    planes = static.columns // 64
    log = planes if g.small else g.width
    group = g.kind == "group"
    before = tile.before or g.small if group else static.offset
    dtype = tl.bfloat16 if static.dtype is torch.bfloat16 else tl.float16
    return {
        "KIND": d.kind, "B0": b0, "B1": b1, "B2": b2, "COLS": static.columns, "ZERO": float(d.zero),
        "MANTISSA": d.mantissa, "UP": d.up(static.dtype) if d.kind == "float" else 1.0,
        "SCALE": g.kind if g.kind in ("row", "group") else "none", "SKIND": static.scale_kind,
        "G": g.size if g.small else 64, "WIDTH": g.width, "LOG": log.bit_length() - 1 if group else 0, "TILES": g.tiles,
        "HAS_Z": static.zero_point, "HAS_O": static.offset, "HAS_R": static.outer, "HAS_B": bias,
        "EVEN": static.k == static.tiles * static.columns, "T": dtype, "BM": tile.bm, "BN": tile.bn, "W": tile.w,
        "SPLIT": parts, "BEFORE": before, "ASM": table_code(static), "AHEAD": tile.ahead, "STAGES": tile.stages,
        "num_warps": tile.warps, "num_stages": tile.stages, **({"launch_pdl": True} if tile.ahead else {}),
    }  # fmt: skip


def grid(static: Static, m: int, tile: Tile, processors: int) -> tuple[int, int, int]:
    """Programs along the rows of the weight, parts of a sum, and rows of the input."""
    rows, cols = -(-static.n // tile.bn), -(-m // tile.bm)
    steps = static.tiles * (32 // tile.w)
    return rows, tiles.split(rows * cols, steps, tile.fill * processors), cols


class Launch:
    """One launch of the kernel for a weight's static properties, a number of rows and a tile."""

    def __init__(self, static: Static, m: int, tile: Tile, processors: int, bias: bool) -> None:
        from . import weight_only_kernel

        self.grid = rows, parts, cols = grid(static, m, tile, processors)
        self.sizes = (m, static.n, static.k, static.tiles)
        self.sums = rows * parts * cols * tile.bm * tile.bn if parts > 1 else 0
        self.locks = rows * cols
        self.launcher = Launcher(lambda: weight_only_kernel.weight_only, _options(static, tile, parts, bias))

    def __call__(self, x: Tensor, w: Operand, bias: Tensor | None, y: Tensor) -> None:
        """Write y [M, N] for checked arguments. x: [M, K], contiguous; all on the device of the first call."""
        sums = locks = w.codes
        if self.sums:
            sums, locks = workspace.parts(self.sums, w.device), workspace.locks(self.locks, w.device)
        tensors = (
            x, w.codes, w.scale, w.zero_point, w.offset, w.table, w.outer, w.codes if bias is None else bias, y, sums,
            locks,
        )  # fmt: skip
        self.launcher(self.grid, tensors, self.sizes)


def launch(x: Tensor, w: Operand, bias: Tensor | None, static: Static, tile: Tile, processors: int) -> Tensor:
    """y [M, N] for checked arguments, with that tile. x: [M, K], contiguous, of static.dtype; bias: [N] or None."""
    y = torch.empty((x.shape[0], static.n), dtype=x.dtype, device=x.device)
    Launch(static, x.shape[0], tile, processors, bias is not None)(x, w, bias, y)
    return y


def dequantize(w: Operand, static: Static) -> Tensor:
    """The weight [N, K] in static.dtype, without ``perm``."""
    from .weight_only_kernel import dequantize as kernel

    y = torch.empty((static.n, static.k), dtype=static.dtype, device=w.codes.device)
    options = _options(static, Tile(16, 64, 32, 4, 2), 1, False)
    names = ("KIND", "B0", "B1", "B2", "COLS", "ZERO", "MANTISSA", "UP", "SCALE", "SKIND", "G", "WIDTH", "LOG", "TILES",
             "HAS_Z", "HAS_O", "HAS_R", "EVEN", "T", "ASM")  # fmt: skip
    kernel[(-(-static.n // ROWS), static.tiles)](
        w.codes, w.scale, w.zero_point, w.offset, w.table, w.outer, y, static.n, static.k,
        **{name: options[name] for name in names}, num_warps=4,
    )  # fmt: skip
    return y


@lru_cache(maxsize=64)
def card(device: torch.device) -> tuple[str, str, int]:
    """Target, name and multiprocessors of a device."""
    if device.type != "cuda":
        return "cpu", "", tiles.processors("")
    properties = torch.cuda.get_device_properties(device)
    return target_of(device), properties.name, properties.multi_processor_count


def bind(case: Case) -> Bound:
    """The kernel for one case: run(x, operand, bias), and parts -> operand."""
    return bind_static(static_of(case.spec, case.shape, case.dtype), case.spec, case.act)


def bind_static(static: Static, spec: QuantSpec, act: ActivationSpec | None = None) -> Bound:
    """As :func:`bind`."""
    n, k, dtype = static.n, static.k, static.dtype
    launches: dict[tuple[int, torch.dtype | None, torch.device], Launch | None] = {}
    fake_quantized = None if act is None else quantize.quantizer(act, dtype, values=True)

    def product(x: Tensor, w: Operand, bias: Tensor | None) -> Tensor:
        if fake_quantized is not None:
            x = fake_quantized(x, w.act_scale, w.act_zero_point).codes
        m = x.shape[0]
        key = (m, None if bias is None else bias.dtype, w.device)
        if key in launches:
            found = launches[key]
        else:
            found = choose(m, bias is not None, w.device)
            if len(launches) >= _LAUNCHES:
                launches.clear()
            launches[key] = found
        if found is None:
            return F.linear(x, dequantize(w, static), None if bias is None else bias.to(dtype))
        y = torch.empty((m, n), dtype=dtype, device=w.device)
        found(x, w, bias, y)
        return y

    def choose(m: int, bias: bool, device: torch.device) -> Launch | None:
        target, name, processors = card(device)
        tile = tiles.choose(target, name, static.decoding, tiles.bucket(m), small=static.small, offset=static.offset)
        return None if tile is None else Launch(static, m, tile, processors, bias)

    return Bound(gpu_arguments.linear_kernel(product, n, k, dtype), lambda parts: operand(static, spec, parts))


def run_tile(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None, tile: Tile | None) -> Tensor:
    """``linear`` with a given tile, None: dequantized; for measuring. w: in layout "gpu", without ``perm``."""
    static = static_of(w.spec, tuple(w.stored_shape), x.dtype)
    held = operand(static, w.spec, w.parts)
    if tile is None:
        return F.linear(x, dequantize(held, static), bias)
    return launch(x, held, bias, static, tile, card(x.device)[2])


def prepared(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None, tile: Tile | None) -> Callable[[], Tensor]:
    """As :func:`run_tile`, with all checks done before: a function that only launches."""
    static = static_of(w.spec, tuple(w.stored_shape), x.dtype)
    held, processors = operand(static, w.spec, w.parts), card(x.device)[2]
    if tile is None:
        return lambda: F.linear(x, dequantize(held, static), bias)
    found = Launch(static, x.shape[0], tile, processors, bias is not None)

    def product() -> Tensor:
        y = torch.empty((x.shape[0], static.n), dtype=x.dtype, device=x.device)
        found(x, held, bias, y)
        return y

    return product


def accepts(case: Case) -> bool | str:
    if case.act is not None:
        return "the activation is quantized"
    return _accepts(case)


def _accepts(case: Case) -> bool | str:
    if case.dtype not in DTYPES:
        return f"for bfloat16 and float16 inputs, not {case.dtype}"
    if (verdict := fits(case.spec, case.shape)) is not True:
        return verdict
    return self_test_verdict.refusal(case.device, "weight_only") or True


def accepts_quantized_input(case: Case) -> bool | str:
    if case.act is None:
        return "weight-only: the activation is not quantized"
    if (verdict := quantize.accepts(case.act, case.dtype)) is not True:
        return verdict
    if (verdict := _accepts(case)) is not True:
        return verdict
    return self_test_verdict.refusal(case.device, quantize.family(case.act)) or True


def _linear(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    case = Case(w.spec, w.act, tuple(w.stored_shape), x.dtype, target_of(w.device), w.perm is not None)
    return bind(case).run_with(x, w.parts, bias)


for _name, _accept in ((NAME, accepts), (QUANTIZED_INPUT, accepts_quantized_input)):
    register_kernel(
        Kernel("linear", _name, _linear, _accept, DEVICES, LAYOUT.name, rank=20, tolerance="bfloat16", bind=bind)
    )
