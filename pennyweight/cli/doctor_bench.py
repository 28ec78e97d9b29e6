"""``pennyweight doctor --bench``: times quantized products, convolutions and fused blocks against float."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

SIZE = 1024  # of matrices
CHANNELS, IMAGE = 64, 56  # of a convolution 3×3; a transposed one 4×4 of stride 2 has four times and a quarter as many
WIDTH, TOKENS = 512, (1, 64)  # of a transformer block
ROWS = (1, 128)
NAMES = ("int8-dynamic", "int8", "int4")
_ROUNDS = 9  # alternating, so that a busy moment affects both sides
_SECONDS = 0.005  # per sample: long relative to the clock's resolution
_NOISE = 2.0  # slowest over fastest sample of one side; near 1.1 on an idle machine


@dataclass(frozen=True)
class Timing:
    """Microseconds quantized and float, medians of alternating samples.

    rows    rows of the input of a product, positions of that of a convolution, tokens of that of a block
    kernel  the kernel; "block" for one native call of a fused block, else why it is not fused
    what    what is timed: a product, a convolution or a block
    """

    config: str
    dtype: str
    rows: int
    kernel: str
    microseconds: float
    float_microseconds: float
    noisy: bool  # the samples disagree: the machine was busy and the ratio is unreliable
    what: str = "products"

    def __str__(self) -> str:
        ratio = self.float_microseconds / self.microseconds
        times = f"{max(ratio, 1 / ratio):.2f}"
        verdict = "same speed" if times == "1.00" else f"{times}x faster" if ratio > 1 else f"{times}x slower"
        verdict += ", but the machine is busy: measure again" if self.noisy else ""
        return (
            f"{self.config:<13}{self.rows:>4} {self._unit:<{len(self._unit) + (self.rows == 1)}} {self.dtype:<9}"
            f"{self.microseconds:>9.1f} us, float {self.float_microseconds:>9.1f} us: {verdict} ({self.kernel})"
        )

    @property
    def _unit(self) -> str:
        unit = "position" if "convolution" in self.what else "token" if "block" in self.what else "row"
        return unit + "s" * (self.rows > 1)


def measure() -> list[Timing]:
    """Time each config against float: products of each dtype, convolutions and a fused transformer block in float32."""
    return [*_products(), *_convolutions(), *_blocks()]


def _convolutions() -> Iterator[Timing]:
    import torch
    from torch import nn

    from ..planning.configs.by_name import by_name
    from ..quantize import quantize_

    wide, small = 4 * CHANNELS, max(1, IMAGE // 4)
    layers: list[tuple[str, nn.Module, tuple[int, ...]]] = [
        (
            f"convolution {CHANNELS} to {CHANNELS} channels, 3×3, {IMAGE}×{IMAGE}",
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, dtype=torch.float32, device="cpu"),
            (1, CHANNELS, IMAGE, IMAGE),
        ),
        (
            f"transposed convolution {wide} to {wide // 2} channels, 4×4, stride 2, {small}×{small}",
            nn.ConvTranspose2d(wide, wide // 2, 4, 2, 1, dtype=torch.float32, device="cpu"),
            (1, wide, small, small),
        ),
    ]
    for what, layer, shape in layers:
        x = torch.randn(shape, dtype=torch.float32, device="cpu")
        for name in NAMES:
            quantized = copy.deepcopy(layer)
            (row,) = quantize_(quantized, by_name(name), lambda module, fqn: True).quantized
            with torch.no_grad():
                seconds, float_seconds, noisy = _alternate(partial(quantized, x), partial(layer, x))
            rows = x.numel() // shape[1]
            yield Timing(name, "float32", rows, row.kernel, seconds * 1e6, float_seconds * 1e6, noisy, what)


def _blocks() -> Iterator[Timing]:
    import torch

    layer = encoder(WIDTH)
    for name in NAMES:
        fused, reason = fused_encoder(WIDTH, name)
        for tokens in TOKENS:
            x = torch.randn(1, tokens, WIDTH, dtype=torch.float32, device="cpu")
            with torch.inference_mode():
                seconds, float_seconds, noisy = _alternate(partial(fused, x), partial(layer, x))
            kernel = f"not fused: {reason}" if reason else "block"
            what = f"transformer block of width {WIDTH}"
            yield Timing(name, "float32", tokens, kernel, seconds * 1e6, float_seconds * 1e6, noisy, what)


def _products() -> Iterator[Timing]:
    import torch
    from torch import nn

    from ..kernels import select
    from ..kernels.table import case_of
    from ..planning.configs.by_name import by_name
    from ..quantize import quantize_

    what = f"products [rows, {SIZE}] @ [{SIZE}, {SIZE}]"
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype).requires_grad_(False)
        for name in NAMES:
            quantized = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
            quantized.weight.data.copy_(layer.weight)
            quantize_(quantized, by_name(name))
            weight: Any = quantized.weight
            for rows in ROWS:
                x = torch.randn(rows, SIZE, dtype=dtype)
                with torch.no_grad():
                    seconds, float_seconds, noisy = _alternate(partial(quantized, x), partial(layer, x))
                kernel = select("linear", case_of(weight, dtype)).name
                short = str(dtype).removeprefix("torch.")
                yield Timing(name, short, rows, kernel, seconds * 1e6, float_seconds * 1e6, noisy, what)


def _alternate(a: Callable[[], Any], b: Callable[[], Any]) -> tuple[float, float, bool]:
    """Median seconds per call of each, and whether the samples of either disagree."""
    counts = [max(1, int(_SECONDS / max(_time(f, 3), 1e-9))) for f in (a, b)]
    samples = [(_time(a, counts[0]), _time(b, counts[1])) for _ in range(_ROUNDS)]
    seconds, float_seconds = (sorted(side) for side in zip(*samples, strict=True))
    return median(seconds), median(float_seconds), any(side[-1] > _NOISE * side[0] for side in (seconds, float_seconds))


def _time(f: Callable[[], Any], count: int) -> float:
    f()
    start = perf_counter()
    for _ in range(count):
        f()
    return (perf_counter() - start) / count


def fused_encoder(width: int, name: str) -> tuple[nn.Module, str]:
    """(nn.TransformerEncoder of one block, quantized and fused; why the block is not fused, or "")."""
    import torch

    from ..inference import fuse_
    from ..planning.configs.by_name import by_name
    from ..quantize import quantize_

    model = encoder(width)
    quantize_(model, by_name(name))
    row = fuse_(model, torch.zeros(1, 2, width, dtype=torch.float32, device="cpu")).rows[0]
    return model, "" if row.kernel == "block" else row.note or "the block is not fused"


def encoder(width: int) -> nn.Module:
    """nn.TransformerEncoder of one float32 block, always with the same weights."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, batch_first=True, norm_first=True, dtype=torch.float32,
            device="cpu",
        )  # fmt: skip
        return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval().requires_grad_(False)
