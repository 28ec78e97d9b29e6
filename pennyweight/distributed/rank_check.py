"""Checks through the process group's store that all ranks have a quantized tensor before they exchange data.

A rank whose model is not quantized would send floats while the others send codes. Backends do not detect this: gloo
terminates the process if sizes differ and returns garbage if they match. The store shows which ranks are missing.
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

PATIENCE = 30.0  # seconds of waiting before a warning
_COUNTS: Counter[str] = Counter()  # number of checks per group so far


def wait_for_all_ranks(group: Any, w: AffineQuantizedTensor) -> None:
    """Wait for all ranks of a group to call this. Warns after :data:`PATIENCE`; after the group's timeout raises
    ValueError with the missing ranks."""
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
            f"rank {dist.get_rank()} is about to exchange a quantized tensor {tuple(w.shape)} ({w.spec}), but after "
            f"{waited:.0f} s rank {', '.join(map(str, missing))} has not sent one. Quantize the same model with the "
            "same config on each rank, before fully_shard"
        )
        if waited > limit:
            raise ValueError(text)
        if waited > PATIENCE and not warned:
            warned = True
            warnings.warn(text, stacklevel=2)
        time.sleep(min(0.001 + waited / 10, 0.5))


def _timeout(group: Any, w: AffineQuantizedTensor) -> float:
    """Timeout of the group's collectives, in seconds."""
    options = getattr(group._get_backend(w.device), "options", None)
    limit = getattr(options, "_timeout", None) or c10d.default_pg_timeout
    return (limit if isinstance(limit, timedelta) else c10d.default_pg_timeout).total_seconds()
