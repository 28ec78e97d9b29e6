"""The kernels to compile for a target before a device is asked: those of the package, then what the stages will launch.

A compiler takes a second for a kernel, and a stage that waits for five hundred of them measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .schemes import GOALS, SCHEMES, TUNED

AHEAD = "pennyweight.kernels.triton.ahead"  # kernels(target): jobs of its own


@dataclass(frozen=True)
class Job:
    """name, and compile(target), which writes into Triton's cache folder."""

    name: str
    compile: Callable[[str], Any]


@dataclass(frozen=True)
class Product:
    """A launch of the weight-only kernel: what decides which compilation it needs.

    dtypes  of the parts of the operand
    m       rows of the input; tile: None for the one that the table of tiles gives
    """

    spec: Any
    dtypes: tuple[Any, ...]
    dtype: Any
    m: int
    n: int
    k: int
    bias: bool = False
    tile: Any = None
    dequantized: bool = False


def jobs(target: str) -> list[Any]:
    """All jobs, in the order of the stages. Launches of the same compilation are one."""
    found: list[Any] = list(import_module(AHEAD).kernels(target)) if find_spec(AHEAD) is not None else []
    launches = [*_self_test(), *_layers(), *_tuned(target), *_timed()]
    found += [job for product in launches for job in _job(target, product)]
    return list({job.name: job for job in found}.values())


def _job(target: str, product: Product) -> Iterator[Job]:
    """Nothing for a product that dequantizes and does not ask for that kernel: torch multiplies."""
    from pennyweight.kernels.triton import tiles
    from pennyweight.kernels.triton.weight_only import grid, static_of

    static = static_of(product.spec, (product.n, product.k), product.dtype)
    tile = product.tile
    if tile is None and not product.dequantized:
        bucket = tiles.bucket(product.m)
        tile = tiles.choose(target, "", static.decoding, bucket, small=static.small, offset=static.offset)
    sizes = "".join("16"[n % 16 == 0] for n in (product.n, product.k, static.tiles)) + (
        "=1" if static.tiles == 1 else ""
    )
    what = f"{product.spec} {product.dtype} {sizes} {'whole' if static.k == static.tiles * static.columns else 'part'}"
    if tile is None:
        yield Job(f"dequantize {what}", partial(_dequantize, product, static))
        return
    split = grid(static, product.m, tile, tiles.processors(target))[1]
    name = f"{what} {tile} split {split}{' bias' * product.bias}"
    yield Job(name, partial(_launch, product, static, tile, tiles.processors(target)))


class Compiles:
    """In place of a kernel: a launch compiles it for the dtypes of its tensors, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def warmup(*args: Any, **options: Any) -> Any:
            plain = [getattr(arg, "dtype", arg) for arg in args]  # pointers count as aligned to 16 bytes
            return self.kernel.warmup(*plain, grid=(1,), **options)

        return warmup


@contextmanager
def _compiling() -> Iterator[None]:
    """The package's own launchers compile: their arguments are not written a second time here."""
    from pennyweight.kernels.triton import weight_only_kernel as kernels

    real = {name: getattr(kernels, name) for name in ("weight_only", "dequantize")}
    try:
        for name, kernel in real.items():
            setattr(kernels, name, Compiles(kernel))
        yield
    finally:
        for name, kernel in real.items():
            setattr(kernels, name, kernel)


def _operand(product: Product) -> Any:
    import torch

    from pennyweight.kernels.triton.weight_only import Operand

    parts = (torch.empty(1, dtype=dtype, device="meta") for dtype in product.dtypes)
    return Operand(*parts, None, torch.device("meta"))


def _launch(product: Product, static: Any, tile: Any, processors: int, target: str) -> None:
    import torch

    from pennyweight.kernels.triton.weight_only import launch

    x = torch.empty(product.m, product.k, dtype=product.dtype, device="meta")
    bias = torch.empty(product.n, dtype=product.dtype, device="meta") if product.bias else None
    with _compiling():
        launch(x, _operand(product), bias, static, tile, processors)


def _dequantize(product: Product, static: Any, target: str) -> None:
    from pennyweight.kernels.triton.weight_only import dequantize

    with _compiling():
        dequantize(_operand(product), static)


# -- what the stages launch --------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _scheme(name: str) -> tuple[Any, tuple[Any, ...]] | None:
    """(spec in layout "gpu", dtypes of the operand's parts) of a scheme; None if the kernel does not read it."""
    import torch
    from torch import nn

    import pennyweight as pw

    layer = nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    pw.quantize_(layer, SCHEMES[name](), filter_fn=lambda module, fqn: True)
    weight: Any = layer.weight.data
    if weight.act is not None:
        return None
    weight = weight.to_layout("gpu")
    return weight.spec, _dtypes(weight, torch.bfloat16)


def _dtypes(weight: Any, dtype: Any) -> tuple[Any, ...]:
    from pennyweight.kernels.triton.weight_only import operand, static_of

    w = operand(static_of(weight.spec, tuple(weight.stored_shape), dtype), weight.spec, weight.parts)
    return tuple(part.dtype for part in (w.codes, w.scale, w.zero_point, w.offset, w.table, w.outer))


def _of(scheme: str, m: int, n: int, k: int, bias: bool = False, tile: Any = None) -> Iterator[Product]:
    import torch

    found = _scheme(scheme)
    if found is not None:
        yield Product(*found, torch.bfloat16, m, n, k, bias, tile)


def _layers() -> Iterator[Product]:
    from .conformance import ROWS, layer_size

    for scheme in SCHEMES:
        for m in ROWS:
            yield from _of(scheme, m, *layer_size(scheme), bias=True)
        yield from _of(scheme, ROWS[-1], *layer_size(scheme))


def _self_test() -> Iterator[Product]:
    import torch

    from pennyweight.kernels.triton import self_test

    for case in self_test.cases(full=True):
        weight, _, bias = self_test._inputs(case, torch.device("cpu"))
        dtypes, dequantized = _dtypes(weight, case.dtype), case.how == "dequantized"
        shape = (int(n) for n in weight.stored_shape)
        bound = Product(weight.spec, dtypes, case.dtype, case.m, *shape, bias is not None, dequantized=dequantized)
        yield bound


def _tuned(target: str) -> Iterator[Product]:
    """The candidates of stage "tune" at its sizes."""
    import torch

    from pennyweight.kernels.triton import tiles
    from pennyweight.kernels.triton.tuning import ROWS, choices
    from pennyweight.kernels.triton.weight_only import static_of

    from .tune import SIZES

    for bucket, rows in ROWS.items():
        for scheme in (s for schemes, buckets in TUNED.values() if bucket in buckets for s in schemes):
            spec = (_scheme(scheme) or (None,))[0]
            for n, k in SIZES if spec is not None else ():
                static = static_of(spec, (n, k), torch.bfloat16)
                for tile in choices(tiles.candidates(target, static.decoding, bucket, small=static.small), bucket):
                    yield from (p for m in rows for p in _of(scheme, m, n, k, tile=tile))


def _timed() -> Iterator[Product]:
    """The shipped tiles at the sizes of "bench" and "model"."""
    from .model import BATCHES, PREFILL, SHAPES, VARIANTS

    for goal in GOALS:
        yield from _of(goal.scheme, goal.m, goal.n, goal.k)
    for scheme in VARIANTS[1:]:
        for n, k in SHAPES:
            for m in (*BATCHES, PREFILL):
                yield from _of(scheme, m, n, k)
