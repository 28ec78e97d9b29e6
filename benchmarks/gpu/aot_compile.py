"""Compiles the Triton kernels for devices that are not there, and reads what the compiler made of them.

The package's own launchers compile: :func:`compiling` puts kernels in their place that stop before the launch, so
signatures and constants are not written a second time. Files have the names in Triton's cache folder that a launch on
the device looks up, if its triton is the same release.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from pennyweight.core.formats import E2M1, E4M3, E8M0, INT2, INT4, INT8, NF4, UINT3, UINT4
from pennyweight.core.spec import TENSOR, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.target import capability, fits
from pennyweight.kernels.triton import quantize, scaled_mm, tiles
from pennyweight.kernels.triton.layout import LAYOUT
from pennyweight.kernels.triton.tiles import Tile
from pennyweight.kernels.triton.weight_only import Operand, Static, dequantize, grid, launch, operand, static_of

# One per generation with other instructions; tests/kernels/triton compiles for all of them
TARGETS = ("cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx942")
SIZE = 4096  # rows and columns of the weights of :func:`kernels`: whole tiles, and several programs share a tile


@dataclass(frozen=True)
class Job:
    """name, and compile(target), which writes into Triton's cache folder and returns the compiled kernel.

    weights  that one program decodes in a step of its loop; 0 where there is no loop
    tile     of the product
    """

    name: str
    compile: Callable[[str], Any]
    weights: int = 0
    tile: Tile | None = None


@dataclass(frozen=True)
class Product:
    """A launch of the weight-only kernel: what decides which compilation it needs.

    dtypes  of the parts of the operand
    m       rows of the input; tile: None for the one that the table of tiles gives
    """

    spec: QuantSpec
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    m: int
    n: int
    k: int
    bias: bool = False
    tile: Tile | None = None
    dequantized: bool = False


# -- without a device --------------------------------------------------------------------------------------------------


class NoDevice:
    """The driver of a device that is not there. ``target``: "cuda:sm_90" or "hip:gfx942"."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        kind, _, arch = self.target.partition(":")
        if kind == "hip":
            return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
        return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

    def get_current_device(self) -> str:
        return self.target  # a kernel keeps the target of a device that it has seen

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def set_current_device(self, device: Any) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_capability(self, device: Any = 0) -> tuple[int, int]:
        return divmod(capability(self.target), 10)

    def map_python_to_cpp_type(self, name: str) -> str:
        return name


class Compiles:
    """In place of a kernel: a launch compiles it for the dtypes of its tensors, and runs nothing."""

    def __init__(self, kernel: Any, found: list[Any]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, size: Any) -> Callable[..., None]:
        def warmup(*args: Any, **options: Any) -> None:
            plain = [getattr(arg, "dtype", arg) for arg in args]  # pointers count as aligned to 16 bytes
            self.found.append(self.kernel.warmup(*plain, grid=(1,), **options))

        return warmup


@contextmanager
def compiling(target: str, module: Any, names: Sequence[str]) -> Iterator[list[Any]]:
    """Within this context, launches of these kernels of a module compile them for a target. Yields what was compiled.
    Not for threads that run kernels."""
    from triton.runtime import driver

    found: list[Any] = []
    active, real = driver._active, {name: getattr(module, name) for name in names}
    try:
        driver.set_active(NoDevice(target))
        for name, kernel in real.items():
            setattr(module, name, Compiles(kernel, found))
        yield found
    finally:
        for name, kernel in real.items():
            setattr(module, name, kernel)
        driver.set_active(active)


# -- the weight-only kernels -------------------------------------------------------------------------------------------


def dtypes_of(weight: AffineQuantizedTensor, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of the parts of the operand of a weight in layout "gpu"."""
    w = operand(static_of(weight.spec, tuple(weight.stored_shape), dtype), weight.spec, weight.parts)
    return tuple(part.dtype for part in (w.codes, w.scale, w.zero_point, w.offset, w.table, w.outer))


@lru_cache(maxsize=1024)
def _dtypes(spec: QuantSpec, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    x = torch.zeros(64, 1024, dtype=dtype, device="cpu")
    return dtypes_of(AffineQuantizedTensor.from_float(x, spec).to_layout("gpu"), dtype)


def product(spec: QuantSpec, dtype: torch.dtype, m: int, n: int, k: int, **given: Any) -> Product:
    """The product of m rows with a weight [n, k] of a spec; given: more fields of Product."""
    return Product(spec, _dtypes(spec, dtype), dtype, m, n, k, **given)


def job(target: str, wanted: Product) -> Job:
    """The job that compiles what a product launches: it, or the kernel that dequantizes for torch's product."""
    static = static_of(wanted.spec, (wanted.n, wanted.k), wanted.dtype)
    tile = wanted.tile
    if tile is None and not wanted.dequantized:
        bucket = tiles.bucket(wanted.m)
        tile = tiles.choose(target, "", static.decoding, bucket, small=static.small, offset=static.offset)
    sizes = "".join("16"[n % 16 == 0] for n in (wanted.n, wanted.k, static.tiles)) + "=1" * (static.tiles == 1)
    whole = "whole" if static.k == static.tiles * static.columns else "part"
    what = f"{wanted.spec} {str(wanted.dtype).removeprefix('torch.')} {sizes} {whole}"
    if tile is None:
        return Job(f"dequantize {what}", partial(_dequantize, wanted, static))
    split = grid(static, wanted.m, tile, tiles.processors(target))[1]
    name = f"{what} {tile} split {split}{' bias' * wanted.bias}"
    weights = static.columns * tile.bn * tile.w // 32
    return Job(name, partial(_launch, wanted, static, tile), weights, tile)


def _operand(wanted: Product) -> Operand:
    codes, scale, zero, offset, table, outer = (torch.empty(1, dtype=dtype, device="meta") for dtype in wanted.dtypes)
    return Operand(codes, scale, zero, offset, table, outer, None, torch.device("meta"))


def _launch(wanted: Product, static: Static, tile: Tile, target: str) -> Any:
    from pennyweight.kernels.triton import weight_only_kernel

    x = torch.empty(wanted.m, wanted.k, dtype=wanted.dtype, device="meta")
    bias = torch.empty(wanted.n, dtype=wanted.dtype, device="meta") if wanted.bias else None
    with compiling(target, weight_only_kernel, ("weight_only",)) as found:
        launch(x, _operand(wanted), bias, static, tile, tiles.processors(target))
    return found[0]


def _dequantize(wanted: Product, static: Static, target: str) -> Any:
    from pennyweight.kernels.triton import weight_only_kernel

    with compiling(target, weight_only_kernel, ("dequantize",)) as found:
        dequantize(_operand(wanted), static)
    return found[0]


_BF16 = torch.bfloat16
# Short name -> a spec of each way to decode and to scale: what is compiled for every target at each run of the tests
FORMATS = {
    "int4 g64": QuantSpec(INT4, (64,), scale=_BF16),
    "uint4 g64 offset": QuantSpec(UINT4, (64,), mid=8, scale=_BF16, offset=_BF16),
    "int8 row": QuantSpec(INT8, (-1,), scale=_BF16),
    "int2 g128": QuantSpec(INT2, (128,), scale=_BF16),
    "uint3 g64 zero point": QuantSpec(UINT3, (64,), zero_point=True, scale=_BF16),
    "e4m3 row": QuantSpec(E4M3, (-1,)),
    "mxfp4": QuantSpec(E2M1, (32,), scale=QuantSpec(E8M0, (1,), scale=None)),
    "nvfp4": QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, TENSOR)),
    "nf4 g64": QuantSpec(NF4, (64,)),
}


def products(name: str) -> Iterator[Product]:
    """Those of one of FORMATS, with shipped tiles. The rule has no tiles of its own above 128 rows."""
    spec = FORMATS[name]
    for m in (8, 16, 32, 64, 128):
        yield product(spec, _BF16, m, SIZE, SIZE)
    yield product(spec, _BF16, 1, SIZE, SIZE, dequantized=True)
    if name in ("int4 g64", "int8 row"):
        yield product(spec, _BF16, 1, SIZE - 8, SIZE - 72, bias=True)
        for m in (1, 16):
            yield product(spec.with_(scale=torch.float16), torch.float16, m, SIZE, SIZE)


def every_product(target: str) -> Iterator[Product]:
    """Each format and scale that the layout has, and each candidate of FORMATS."""
    for spec in dict.fromkeys(spec for spec, _ in LAYOUT.examples):
        for dtype in (_BF16, torch.float16):
            for m in (8, 16, 64, 128):
                yield product(spec, dtype, m, SIZE, SIZE)
            yield product(spec, dtype, 1, SIZE, SIZE, dequantized=True)
    for spec in FORMATS.values():
        static = static_of(spec, (SIZE, SIZE), _BF16)
        for m in tiles.BUCKETS:
            for tile in tiles.candidates(target, static.decoding, m, small=static.small):
                yield product(spec, _BF16, m, SIZE, SIZE, tile=tile)


def kernels(target: str, names: Sequence[str] = tuple(FORMATS), full: bool = False) -> list[Job]:
    """Jobs for a target, each compilation once: the shipped tiles of some of FORMATS; full: of all formats, and all
    candidates."""
    wanted = [each for name in names for each in products(name)] + (list(every_product(target)) if full else [])
    return list({each.name: each for each in (job(target, one) for one in wanted)}.values())


# -- products of quantized inputs, and their quantizing ----------------------------------------------------------------


_ROWS = (1, 17, 33, 100, 4096)


def input_kernels(target: str) -> list[Job]:
    """Jobs for a target: products of int8 and float8 codes with tiles of each bucket, inputs quantized per token."""
    found = []
    for f, m in ((f, m) for f, (_, _, devices, _) in scaled_mm.ROWS.items() if fits(devices, target) for m in _ROWS):
        for dtype, bias in ((_BF16, False), (torch.float16, True)):
            tile = scaled_mm.choose(f, target, tiles.bucket(m), SIZE, dtype, tiles.processors(target))
            if tile is not None:
                name = f"{f} product, {m} rows, {str(dtype).removeprefix('torch.')} {tile}{' bias' * bias}"
                found.append(Job(name, partial(_scaled_product, f.code_dtype, m, dtype, bias, tile)))
    for act in (QuantSpec(INT8, (-1,)), QuantSpec(INT8, (-1,), zero_point=True), QuantSpec(E4M3, (-1,))):
        for k in (SIZE, 20000):  # one pass, and a loop
            found.append(Job(f"quantize {act}, {k} columns", partial(_quantize, act, k)))
    return found


def _scaled_product(
    code: torch.dtype, m: int, dtype: torch.dtype, bias: bool, tile: scaled_mm.Tile, target: str
) -> Any:
    from pennyweight.kernels.triton import scaled_mm_kernel

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    codes = empty(SIZE, SIZE, dtype=code)
    w = scaled_mm.Operand(codes, empty(SIZE), None, codes.device, None, None)
    with compiling(target, scaled_mm_kernel, ("product", "product_blocks")) as found:
        scaled_mm.launch(
            empty(m, SIZE, dtype=code), empty(m, 1), w, empty(SIZE, dtype=dtype) if bias else None, dtype, tile,
            tiles.processors(target),
        )  # fmt: skip
    return found[0]


def _quantize(spec: QuantSpec, k: int, target: str) -> Any:
    from pennyweight.kernels.triton import quantize_kernel

    static = quantize.static_of(ActivationSpec(spec), _BF16)
    assert not isinstance(static, str), static
    with compiling(target, quantize_kernel, ("quantize_rows",)) as found:
        quantize.launch(torch.empty(8, k, dtype=_BF16, device="meta"), static, target=target)
    return found[0]


# -- what the compiler made --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a compiled kernel needs.

    spills        instructions that move registers to memory; on AMD: registers that are moved
    stack         bytes of memory per thread, for spills and arrays
    shared        bytes per program
    matrix        instructions of the matrix unit: {"HGMMA"}, {"HMMA"}, {"v_mfma_f32_16x16x16_bf16"}; empty: none
    wide_loads    whether the loop loads 16 bytes at once, which codes are
    weight_stores  instructions of the loop that store more than 4 bytes of a thread to shared memory: decoded weights
    loop          instructions of the loop, 0 if there is none
    per_weight    of them for each weight; NVIDIA only, as are weight_stores and loop
    """

    registers: int
    spills: int
    stack: int
    shared: int
    matrix: frozenset[str]
    wide_loads: bool
    weight_stores: int
    loop: int
    per_weight: float


def report(each: Job, compiled: Any) -> Report:
    """Read the compiled kernel of a job."""
    return _read_amd(compiled) if "amdgcn" in compiled.asm else _read_nvidia(each, compiled)


_MATRIX = re.compile(r"(HGMMA|QGMMA|IGMMA|HMMA|IMMA|QMMA|UTC\w*MMA)")
_BRANCH = re.compile(r"BRA(?:\.\w+)*\s+(?:!?U?P\d+,\s*)?0x([0-9a-f]+)")


def _read_nvidia(each: Job, compiled: Any) -> Report:
    from triton import knobs

    program = Path(knobs.nvidia.cuobjdump.path)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        sass, usage = (
            subprocess.run([program, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    used = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    everything, loop = _instructions(sass)
    operations = Counter(_operation(text) for text in loop)
    threads = each.tile.warps * 32 if each.tile is not None else 0
    return Report(
        registers=int(used["REG"]),
        spills=sum(_operation(text).startswith(("LDL", "STL")) for text in everything),
        stack=int(used["STACK"]),
        shared=compiled.metadata.shared,
        matrix=frozenset(found[1] for text in everything if (found := _MATRIX.match(_operation(text)))),
        wide_loads=any(re.match(r"(LDG|LDGSTS)\b.*\.128", operation) for operation in operations),
        weight_stores=sum(n for op, n in operations.items() if re.match(r"STSM|STS\b.*\.(64|128)", op)),
        loop=len(loop),
        per_weight=len(loop) * threads / each.weights if each.weights else 0.0,
    )


def _instructions(sass: str) -> tuple[list[str], list[str]]:
    """All instructions, and those of the longest loop: from the target of a backward branch to the branch."""
    found = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)]
    loop: list[str] = []
    for at, text in found:
        branch = _BRANCH.search(text)
        if branch is not None and (start := int(branch[1], 16)) < at:
            body = [other for place, other in found if start <= place <= at]
            loop = max(loop, body, key=len)
    return [text for _, text in found], loop


def _operation(text: str) -> str:
    """ "HGMMA.64x16x16.F32.BF16" of "@P0 HGMMA.64x16x16.F32.BF16 R24, R8, ..."."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def _read_amd(compiled: Any) -> Report:
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])  # type: ignore[index]

    return Report(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count"),  # those of scalar registers go to vector registers
        stack=number("private_segment_fixed_size"),
        shared=compiled.metadata.shared,
        matrix=frozenset(re.findall(r"\bv_mfma_\w+", text)),
        wide_loads=re.search(r"\b(global|buffer)_load_dwordx4\b", text) is not None,
        weight_stores=0,
        loop=0,
        per_weight=0.0,
    )
