"""The kernels that the stages will launch, to compile for a target before a device is asked.

A compiler takes a second for a kernel, and a stage that waits for five hundred of them measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from pennyweight.kernels.table import case_of, moved, select
from pennyweight.kernels.triton import self_test, self_test_inputs, tiles
from pennyweight.kernels.triton.tuning import ROWS, choices
from pennyweight.kernels.triton.weight_only import static_of

from .aot_compile import Job, Product, compiling, dtypes_of, job
from .schemes import GOALS, SCHEMES, TUNED


def jobs(target: str) -> list[Job]:
    """All jobs, in the order of the stages. Launches of the same weight-only compilation are one."""
    launches = [*_self_test(), *_layers(), *_tuned(target), *_timed()]
    found = [*(job(target, product) for product in launches), *_inputs()]
    found += [*_scaled()]
    return list({each.name: each for each in found}.values())


# -- what the stages launch --------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _scheme(name: str) -> tuple[Any, tuple[Any, ...]] | None:
    """(spec in layout "gpu", dtypes of the operand's parts) of a scheme; None if the kernel does not read it."""
    import pennyweight as pw

    layer = nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    pw.quantize_(layer, SCHEMES[name](), filter_fn=lambda module, fqn: True)
    weight: Any = layer.weight.data
    if select("linear", moved(case_of(weight, torch.bfloat16), "cuda:sm_90"), any_layout=True).layout != "gpu":
        return None
    weight = weight.to_layout("gpu")
    return weight.spec, dtypes_of(weight, torch.bfloat16)


def _of(scheme: str, m: int, n: int, k: int, bias: bool = False, tile: Any = None) -> Iterator[Product]:
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
    for case in self_test.products(full=True):
        weight, _, bias = self_test._inputs(case, torch.device("cpu"))
        dtypes, dequantized = dtypes_of(weight, case.dtype), case.how == "dequantized"
        shape = (int(n) for n in weight.stored_shape)
        bound = Product(weight.spec, dtypes, case.dtype, case.m, *shape, bias is not None, dequantized=dequantized)
        yield bound


def _inputs() -> Iterator[Job]:
    """The cases of kernels that quantize inputs, and of products of such inputs."""
    for check in self_test_inputs.cases(full=True):
        yield Job(check.name, partial(_compile, check.launches))


def _scaled() -> Iterator[Job]:
    """Products of quantized inputs at the sizes of "bench" and "model"."""
    from .model import BATCHES, PREFILL, SHAPES

    sizes = {(m, n, k) for n, k in SHAPES for m in (*BATCHES, PREFILL)}
    for scheme, act in (("float8-dynamic", self_test_inputs.E4M3_TOKEN), ("int8-dynamic", self_test_inputs.INT8_TOKEN)):
        goals = {(goal.m, goal.n, goal.k) for goal in GOALS if goal.scheme == scheme}
        for m, n, k in sorted(sizes | goals):
            _, _, launches = self_test_inputs._product(torch.bfloat16, m, n, k, act=act)
            yield Job(f"{scheme} m{m} {n}x{k}", partial(_compile, launches))


def _compile(launches: Callable[[str], object], target: str) -> Any:
    from pennyweight.kernels.triton import quantize_kernel, scaled_mm_kernel

    names = ("product", "product_blocks")
    with (
        compiling(target, quantize_kernel, ("quantize_rows",)) as found,
        compiling(target, scaled_mm_kernel, names) as products,
    ):
        launches(target)
    return [*found, *products][-1]


def _tuned(target: str) -> Iterator[Product]:
    """The candidates of stage "tune" at its sizes."""
    from .tune import sizes

    for bucket, rows in ROWS.items():
        for scheme in (s for schemes, buckets in TUNED.values() if bucket in buckets for s in schemes):
            spec = (_scheme(scheme) or (None,))[0]
            for n, k in sizes(bucket) if spec is not None else ():
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
