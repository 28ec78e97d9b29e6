"""Runs a piece of a test under one instruction set of the native library, with so many threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pennyweight.kernels.cpu import library


@contextmanager
def instruction_set(isa: str, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    library.use_isa(isa)
    try:
        yield
    finally:
        library.use_isa("")
        torch.set_num_threads(before)
