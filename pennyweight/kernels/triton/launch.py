"""Launches of Triton kernels in few microseconds of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # CPU builds have none


class Launcher:
    """A kernel and what is known while it is compiled, for one device.

    Triton's own launcher looks at each argument to choose the compiled kernel, and asks the driver about each address:
    longer than most products take. Here all that it looks at is the same at each call: dtypes, sizes that count as
    multiples of 16, and addresses at multiples of 16 bytes. The caller has checked that, and the devices.

    kernel   returns the kernel; called until it is compiled
    options  arguments that are known while it is compiled, by name, and Triton's own as num_warps
    """

    def __init__(self, kernel: Callable[[], Any], options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options
        self.compiled: Any = None
        self.constants: tuple[Any, ...] = ()

    def __call__(self, grid: tuple[int, ...], tensors: Sequence[Tensor], numbers: Sequence[float]) -> None:
        """Launch it on the current stream of the tensors' device. The kernel's arguments are tensors, then numbers,
        then those of ``options``."""
        if self.compiled is not None:
            assert _stream_of is not None
            stream = _stream_of(tensors[0].get_device())
            addresses = [t.data_ptr() for t in tensors]
            self.compiled[grid](*addresses, *numbers, *self.constants, stream=stream)
            return
        kernel = self.kernel()
        compiled = kernel[grid](*tensors, *numbers, **self.options)
        if hasattr(compiled, "packed_metadata"):  # not in the interpreter, and not where it is only compiled
            self.constants = tuple(self.options[name] for name in kernel.arg_names if name in self.options)
            self.compiled = compiled
