"""Memory that programs of one kernel call share: sums of the parts of a tile, and the locks that order them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ARENA = 1 << 20  # locks for captured calls of one device: 4 MB
_GUARD = threading.Lock()
_STREAMS: dict[tuple[int, int], Tensor] = {}  # (device, stream) -> locks
_CAPTURED: dict[int, tuple[Tensor, int]] = {}  # device -> locks, and how many are taken


def parts(count: int, device: torch.device) -> Tensor:
    """float32 [count]; not initialized."""
    return torch.empty(count, dtype=torch.float32, device=device)


def locks(count: int, device: torch.device) -> Tensor:
    """int32 zeros [count or more], which the kernel leaves zero.

    Calls on one stream run one after the other and share an array. A captured call is replayed on any stream, beside
    other graphs: it gets locks of its own, for ever, from an array that was zeroed before the capture, because zeroing
    in the graph would be a kernel of its own. If that is used up, or was not there yet, the graph zeroes them.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    count += -count % 4  # each array starts at a multiple of 16 bytes, as the compiled kernel expects
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        with _GUARD:
            arena, taken = _CAPTURED.get(index, (None, 0))
            if arena is not None and taken + count <= arena.numel():
                _CAPTURED[index] = (arena, taken + count)
                return arena[taken : taken + count]
        return torch.zeros(count, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(index)
    held = _STREAMS.get((index, stream))
    if held is None or held.numel() < count:
        if index not in _CAPTURED:
            with _GUARD:
                _CAPTURED.setdefault(index, (torch.zeros(_ARENA, dtype=torch.int32, device=device), 0))
        # kernels already launched keep the old array: the allocator reuses its memory in stream order
        held = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
        _STREAMS[index, stream] = held
    return held


@contextmanager
def temporary_locks(device: torch.device) -> Iterator[None]:
    """Locks that captures in this context take are free again after it: for graphs that are gone by then, as those that
    are timed. A thousand of them would use up what is there, and each later call would zero its locks in a kernel."""
    if device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    taken = _CAPTURED[index][1] if index in _CAPTURED else 0
    try:
        yield
    finally:
        with _GUARD:
            if index in _CAPTURED:
                _CAPTURED[index] = (_CAPTURED[index][0], taken)
