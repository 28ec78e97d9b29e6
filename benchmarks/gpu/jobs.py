"""The kernels to compile for a target before a device is asked: those of the package, then the tiles to be tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from .schemes import SCHEMES, TUNED


@dataclass(frozen=True)
class Job:
    """name, and compile(target), which writes into Triton's cache folder."""

    name: str
    compile: Callable[[str], Any]


def jobs(target: str) -> list[Any]:
    """All jobs, the most used first. Those of the same kernel are one."""
    from pennyweight.kernels import triton

    found: list[Any] = []
    if list(triton.__path__) and _exists("pennyweight.kernels.triton.ahead"):
        from importlib import import_module

        found += list(import_module("pennyweight.kernels.triton.ahead").kernels(target))
    found += tuned(target)
    return list({job.name: job for job in found}.values())


def _exists(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def tuned(target: str) -> Iterator[Job]:
    """The candidates of stage "tune" at its sizes."""
    import torch

    from pennyweight.kernels.triton import tiles
    from pennyweight.kernels.triton.tuning import ROWS, choices
    from pennyweight.kernels.triton.weight_only import grid, static_of

    from .tune import SIZES

    held = {scheme: _packed(scheme) for schemes, _ in TUNED.values() for scheme in schemes}
    for bucket, rows in ROWS.items():
        wanted = [scheme for schemes, buckets in TUNED.values() if bucket in buckets for scheme in schemes]
        for scheme, (n, k) in ((scheme, size) for scheme in wanted for size in SIZES):
            static = static_of(held[scheme].spec, (n, k), torch.bfloat16)
            shipped = tiles.choose(target, "", static.decoding, bucket, small=static.small)
            listed = choices(tiles.candidates(target, static.decoding, bucket, small=static.small), bucket)
            for tile in dict.fromkeys([shipped, *listed]):
                for m in rows if tile is not None else ():
                    assert tile is not None
                    split = grid(static, m, tile, tiles.processors(target))[1]
                    name = f"{scheme} {tile} split {split}"
                    yield Job(name, partial(_compile, held[scheme], static, tile, split))


def _packed(scheme: str) -> Any:
    """A small weight of the scheme in layout "gpu": its spec, and the dtypes of its parts."""
    import torch
    from torch import nn

    import pennyweight as pw

    layer = nn.Linear(1024, 128, bias=False, dtype=torch.bfloat16, device="cpu").requires_grad_(False)
    pw.quantize_(layer, SCHEMES[scheme](), filter_fn=lambda module, name: True)
    weight: Any = layer.weight.data
    return weight.to_layout("gpu")


def _compile(weight: Any, static: Any, tile: Any, split: int, target: str) -> None:
    """With the argument types of weight_only.launch: pointers are aligned to 16 bytes, sizes multiples of 16."""
    import torch

    from pennyweight.kernels.triton.weight_only import _options, operand, static_of
    from pennyweight.kernels.triton.weight_only_kernel import weight_only

    small = static_of(weight.spec, tuple(weight.stored_shape), torch.bfloat16)
    w = operand(small, weight.spec, weight.parts)
    parts = [part.dtype for part in (w.codes, w.scale, w.zero_point, w.offset, w.table, w.outer)]
    sums, locks = (torch.float32, torch.int32) if split > 1 else (torch.int32, torch.int32)
    bf16 = torch.bfloat16
    weight_only.warmup(
        bf16, *parts, torch.int32, bf16, sums, locks, 1, static.n, static.k, static.tiles,
        **_options(static, tile, split, False), grid=(1,),
    )  # fmt: skip
