"""``pennyweight doctor --device cuda --tune``: the fastest tiles of the weight-only kernels on this card."""

from __future__ import annotations

from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .doctor_gpu import GpuHealth

SECONDS = 300.0
SIZES = ((8192, 8192), (4096, 4096))
SCHEMES = ("int4", "int8")


def tune(health: GpuHealth, device: torch.device) -> str:
    """Time the candidates of every scheme and bucket of rows. Returns the path of the file."""
    import torch

    from ..core.progress import step
    from ..kernels.triton import tiles, weight_only
    from ..kernels.triton.timing import DeviceTimer
    from ..kernels.triton.tuning import ROWS, fastest, shortlist
    from .doctor_gpu import copies, quantized_weight

    timer, end = DeviceTimer(str(device)), monotonic() + SECONDS
    lines: list[dict[str, Any]] = []
    with step("tuning") as told:
        for number, (scheme, bucket) in enumerate((scheme, bucket) for scheme in SCHEMES for bucket in ROWS):
            told(number, len(SCHEMES) * len(ROWS), f"{scheme}, {bucket} rows")
            products = {}
            for n, k in SIZES:
                weight = quantized_weight(scheme, n, device)
                held = copies(timer, weight if weight.spec.layout == "gpu" else weight.to_layout("gpu"))
                for m in ROWS[bucket]:
                    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                    products[f"{m} rows, {n}x{k}"] = [(x, w) for w in held]
            static = weight_only.static_of(weight.spec, (n, k), torch.bfloat16)
            d, small, offset = static.decoding, static.small, static.offset
            shipped = tiles.choose(health.target, "", d, bucket, small=small, offset=offset)
            listed = shortlist(tiles.candidates(health.target, d, bucket, small=small, offset=offset), bucket)
            found = fastest(listed, shipped, products, weight_only.prepared, timer, lambda: end - monotonic())
            lines.append(
                {
                    "device": health.card, "family": tiles.family(d, small=small, offset=offset), "m": bucket,
                    "tile": None if found.tile is None else asdict(found.tile),
                    "source": f"pennyweight {health.versions['pennyweight']} doctor --tune, triton"
                    f" {health.versions['triton']}, driver {health.driver}",
                }
            )  # fmt: skip
            timer.release()
    path = tiles.user_file()
    kept = [line for line in tiles.read(path) if line.get("device") != health.card]
    tiles.write(path, [*kept, *lines])
    return str(path)
