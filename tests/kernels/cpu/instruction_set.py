"""Runs a piece of a test under one instruction set of the native library, with so many threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def is_zen_4() -> bool:
    """Whether this is an AMD processor with bfloat16 instructions, on which numbers of other libraries were recorded:
    elsewhere their products of floats differ in the last bits."""
    cpus = Path("/proc/cpuinfo")
    return "avx512_bf16" in library.isas() and cpus.exists() and "AuthenticAMD" in cpus.read_text()
