"""``pennyweight doctor --device cuda --tune``: the fastest tiles of the weight-only kernels on this card."""

from __future__ import annotations

import json
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .doctor_gpu import GpuHealth

SECONDS = 300.0
SIZES = ((4096, 4096), (8192, 8192))
BITS = {4: "int4", 8: "int8"}


def tune(health: GpuHealth, device: torch.device) -> str:
    """Time the candidates of every width, bucket of rows and size. Returns the path of the file."""
    from pathlib import Path

    import torch

    from ..core.progress import step
    from ..kernels.triton import tiles, weight_only
    from ..kernels.triton.timing import DeviceTimer
    from ..kernels.triton.tuning import ROWS, fastest
    from .doctor_gpu import _copies, _weight

    timer, end = DeviceTimer(str(device)), monotonic() + SECONDS
    jobs = [(bits, size) for bits in BITS for size in SIZES]
    lines: list[dict[str, Any]] = []
    with step("tuning") as told:
        for number, (bits, (n, k)) in enumerate(jobs):
            told(number, len(jobs), f"{BITS[bits]} {n}x{k}")
            weight = _weight(BITS[bits], k, device)
            held = _copies(timer, weight if weight.spec.layout == "gpu" else weight.to_layout("gpu"))
            for bucket, rows in ROWS.items():
                inputs = {m: [torch.randn(m, k, device=device, dtype=torch.bfloat16)] * len(held) for m in rows}
                shipped = tiles.choose(health.target, bits, rows[0], n, k)
                found = fastest(
                    tiles.candidates(health.target, bits, bucket), shipped, held, inputs, weight_only.run_tile, timer,
                    lambda: end - monotonic(),
                )  # fmt: skip
                key = {"target": health.target, "family": "int", "bits": bits, "m": bucket}
                key["size"] = tiles.size_of(n, k)
                lines.append({**key, "tile": asdict(found.tile), "us": round(found.timing.us, 3)})
    path = Path(tiles.user_file())
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"device": health.card, "triton": health.versions["triton"], "pennyweight": health.versions["pennyweight"]}
    path.write_text(json.dumps({**head, "lines": lines}, indent=1) + "\n", "utf-8")
    return str(path)
