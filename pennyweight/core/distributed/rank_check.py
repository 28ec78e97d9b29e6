"""Whether all ranks of a group bring a quantized tensor, asked through their store before they exchange a byte.

A rank whose model is not quantized sends floats where the others send codes. Backends do not survive that: gloo ends
the process when sizes differ, and gives garbage where they do not. A store knows who has come and who has not.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..tensor import AffineQuantizedTensor

PATIENCE = 30.0  # seconds of waiting after which it is said what for
_COUNTS: Counter[str] = Counter()  # meetings of each group so far


def wait_for_all_ranks(group: Any, w: AffineQuantizedTensor) -> None:
    """Wait for all ranks of a group to call this. Raises ValueError, with the ranks that did not, after the group's
    timeout; warns after :data:`PATIENCE`."""
    store, name = c10d._get_default_store(), str(group.group_name)
    turn = _COUNTS[name]
    _COUNTS[name] += 1
    everyone = dist.get_process_group_ranks(group)
    keys = {rank: f"pennyweight/{name}/{turn}/{rank}" for rank in everyone}
    store.set(keys[dist.get_rank()], "here")
    start, limit = time.monotonic(), _timeout(group, w)
    warned = False
    while True:
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if not missing:
            return
        waited = time.monotonic() - start
        text = (
            f"rank {dist.get_rank()} is about to exchange a quantized tensor {tuple(w.shape)} ({w.spec}), and after "
            f"{waited:.0f} s rank {', '.join(map(str, missing))} has brought none. Quantize the same model with the "
            "same config on each rank, before fully_shard"
        )
        if waited > limit:
            raise ValueError(text)
        if waited > PATIENCE and not warned:
            warned = True
            warnings.warn(text, stacklevel=2)
        time.sleep(min(0.001 + waited / 10, 0.5))


def _timeout(group: Any, w: AffineQuantizedTensor) -> float:
    """Seconds after which the group's own collectives would give up."""
    options = getattr(group._get_backend(w.device), "options", None)
    limit = getattr(options, "_timeout", None) or c10d.default_pg_timeout
    return (limit if isinstance(limit, timedelta) else c10d.default_pg_timeout).total_seconds()
