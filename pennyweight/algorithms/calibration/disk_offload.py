"""Offloads weights, copies of weights and activations that do not fit into memory to memory-mapped temporary files, and
returns freed memory to the system."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor

MAPPED = "mapped-"  # the beginning of the name that a file has until it is mapped
SMALL = 1 << 16  # bytes: a smaller tensor stays in memory, because every file takes pages and an entry of the kernel
_FOLDER: ContextVar[Path | None] = ContextVar("folder of offloaded tensors", default=None)


@contextmanager
def offload_to(folder: str | Path | None) -> Iterator[None]:
    """Inside, the functions below keep tensors in files in ``folder``; None: in memory."""
    token = _FOLDER.set(None if folder is None else Path(folder))
    try:
        yield
    finally:
        _FOLDER.reset(token)


def copy_of(t: Tensor) -> Tensor:
    """A copy of a plain tensor. Raises OSError if the disk is full."""
    t = t.detach()
    return empty(tuple(t.shape), t.dtype, t.device).copy_(t) if t.is_contiguous() else t.clone()


def offloaded(t: Tensor) -> Tensor:
    """The tensor itself, or within :func:`offload_to` a copy in a file, if it is on the CPU and not small; each part of
    a quantized one."""
    if isinstance(t, AffineQuantizedTensor):
        return t.with_(parts=t.parts.map(offloaded)) if _FOLDER.get() is not None else t
    return copy_of(t) if _folder_for(t.nbytes, t.device) is not None else t


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without values: in a file within :func:`offload_to`, if it is on the CPU and not small."""
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    folder = _folder_for(count, device)
    if folder is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _mapped(folder, count).view(dtype).view(shape)


def _folder_for(count: int, device: torch.device) -> Path | None:
    return _FOLDER.get() if device.type == "cpu" and count >= SMALL else None


def offload_weights_(model: nn.Module) -> None:
    """Move the float weights of a model to files that can be written to, so that no change of them takes memory: a page
    that the system takes back is written to its file. Parameters keep their identity."""
    with torch.no_grad():
        for p in model.parameters():  # tied ones once
            if not isinstance(p, AffineQuantizedTensor) and p.is_floating_point() and p.layout is torch.strided:
                p.data = copy_of(p.data)


def trim_heap() -> None:
    """Within :func:`offload_to`, return freed memory to the system. glibc keeps arrays of up to 32 MB for later, and a
    process that allocates large and small ones in turn grows by the gaps between them; other C libraries return such
    arrays themselves."""
    if _FOLDER.get() is not None and sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))


def _mapped(folder: Path, count: int) -> Tensor:
    """uint8 [count] in a file that has no name, so that it goes with its last tensor, also if the process is killed."""
    handle, path = tempfile.mkstemp(dir=folder, prefix=MAPPED)
    try:
        try:
            _reserve(handle, count)
        finally:
            os.close(handle)
        return torch.from_file(path, shared=True, size=count, dtype=torch.uint8)
    finally:
        with suppress(PermissionError):  # Windows does not remove files that are mapped; the folder is removed later
            os.unlink(path)


def _reserve(handle: int, count: int) -> None:
    """Take the space on the disk now: if it is full, that is an OSError here, and SIGBUS at a write to the mapping."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, count)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    zeros = bytes(1 << 20)
    for start in range(0, count, len(zeros)):
        left = memoryview(zeros)[: count - start]
        while left:
            left = left[os.write(handle, left) :]
