"""``pennyweight doctor --device cuda --bench --tune``: times of products on a GPU, and the fastest tiles for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..core.tensor import AffineQuantizedTensor

SIZE = 4096  # of the matrices that are timed
ROWS = (1, 16, 256)
TUNED, TUNED_SIZES = ("int4", "int8"), ((8192, 8192), (4096, 4096))
SECONDS = 300.0  # for tuning, most of it the compiler's


@dataclass(frozen=True)
class GpuTiming:
    """Microseconds of one product in a CUDA graph, quantized and in bfloat16. spread: of the noisier of the two."""

    scheme: str
    rows: int
    microseconds: float
    bf16_microseconds: float
    spread: float
    kernel: str

    def cells(self) -> tuple[str, ...]:
        ratio = self.bf16_microseconds / self.microseconds
        return (
            self.scheme, str(self.rows), f"{self.microseconds:.1f}", f"{self.bf16_microseconds:.1f}", f"{ratio:.2f}",
            f"{self.spread:.0%}", self.kernel,
        )  # fmt: skip


def quantized_weight(name: str, size: int, device: torch.device) -> AffineQuantizedTensor:
    """As quantize_ leaves it in a linear layer."""
    import torch
    from torch import nn

    from ..planning.configs.by_name import by_name
    from ..quantize import quantize_

    layer = nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    quantize_(layer, by_name(name), lambda module, fqn: True)
    weight: Any = layer.weight.data
    return weight


def copies(timer: Any, weight: Any) -> list[Any]:
    """The weight and clones of it, together larger than the cache."""
    return [weight, *(weight.clone() for _ in range(timer.copies(int(weight.nbytes)) - 1))]


def products(scheme: str, kernel: str, device: torch.device) -> Iterator[GpuTiming]:
    """F.linear beside bfloat16, for several numbers of rows."""
    import torch
    from torch.nn import functional as F

    from ..kernels.triton.timing import DeviceTimer

    timer = DeviceTimer(str(device))
    weights = copies(timer, quantized_weight(scheme, SIZE, device))
    floats = copies(timer, torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) * SIZE**-0.5)
    for rows in ROWS:
        x = torch.randn(rows, SIZE, device=device, dtype=torch.bfloat16)
        quantized_time, float_time = (timer.time([partial(F.linear, x, w) for w in ws]) for ws in (weights, floats))
        yield GpuTiming(
            scheme, rows, quantized_time.us, float_time.us, max(quantized_time.spread, float_time.spread), kernel
        )


def tune(card: str, target: str, source: str, device: torch.device) -> str:
    """Time the candidates of every scheme and bucket of rows, and keep the best for this card. Returns the path.

    source  what the lines say about where they come from
    """
    import torch

    from ..kernels.triton import tiles, weight_only
    from ..kernels.triton.timing import DeviceTimer
    from ..kernels.triton.tuning import ROWS as BUCKETS
    from ..kernels.triton.tuning import choices, fastest
    from ..support.progress import step

    timer, end = DeviceTimer(str(device)), monotonic() + SECONDS
    lines: list[dict[str, Any]] = []
    with step("tuning") as advance:
        for number, (scheme, bucket) in enumerate((scheme, bucket) for scheme in TUNED for bucket in BUCKETS):
            advance(number, len(TUNED) * len(BUCKETS), f"{scheme}, {bucket} rows")
            products = {}
            for n, k in TUNED_SIZES:
                weight = quantized_weight(scheme, n, device)
                weights = copies(timer, weight if weight.spec.layout == "gpu" else weight.to_layout("gpu"))
                for m in BUCKETS[bucket]:
                    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                    products[f"{m} rows, {n}x{k}"] = [(x, w) for w in weights]
            static = weight_only.static_of(weight.spec, (n, k), torch.bfloat16)
            d, small, offset = static.decoding, static.small, static.offset
            shipped = tiles.choose(target, "", d, bucket, small=small, offset=offset)
            listed = choices(tiles.candidates(target, d, bucket, small=small), bucket)
            found = fastest(listed, shipped, products, weight_only.prepared, timer, lambda: end - monotonic())
            lines.append(
                {
                    "device": card, "family": tiles.family(d, small=small, offset=offset), "m": bucket,
                    "tile": None if found.tile is None else asdict(found.tile),
                    "source": source,
                }
            )  # fmt: skip
            timer.release()
    path = tiles.user_file()
    kept = [line for line in tiles.read(path) if line.get("device") != card]
    tiles.write(path, [*kept, *lines])
    return str(path)
