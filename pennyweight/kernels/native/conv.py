"""Native convolutions: checks of the input, the bias and the parts of a weight; see arguments.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ...core.tracing import in_memory
from ..cpu.abi import Conv, ConvArgs
from .arguments import (
    FLOAT_KINDS,
    Operand,
    address,
    changed_part,
    check_status,
    native_function,
)

_CHANNELS_LAST = torch.channels_last
ConvolutionProduct = Callable[..., "Tensor | None"]


def convolution_sizes(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Size of the output on each spatial axis: floor((n + 2 padding - dilation (kernel - 1) - 1) / stride) + 1."""
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True)
    ]


def output_format(x: Tensor) -> torch.memory_format:
    """Memory format of the output for an input [N, C, H, W]: that of torch's float convolution on a CPU. In one
    dimension its outputs are contiguous."""
    plain, last = x.is_contiguous(), x.is_contiguous(memory_format=_CHANNELS_LAST)
    if plain != last:
        return torch.contiguous_format if plain else _CHANNELS_LAST
    return suggest_memory_format(x)


def convolution(struct: Conv, dtype: torch.dtype) -> ConvolutionProduct:
    """(x, operand, bias, stride, padding, dilation, groups) -> y, for weights that ``struct`` describes.

    x: [N, groups * C, H, W] or [N, groups * C, W] of ``dtype``, the lists with one entry, or with one for
    each spatial axis. y: in the memory format that torch's float convolution chooses. Returns None if native code
    cannot read x or the bias, or if sizes do not fit: torch's own convolution has the message. Raises ArgumentError if
    a part lost its memory, and MemoryError.
    """
    call, threads, weight = native_function("pw_convolution"), torch.get_num_threads, ctypes.addressof(struct)
    o, c, kernel = int(struct.o), int(struct.c), (int(struct.kh), int(struct.kw))

    def run(
        x: Tensor, w: Operand, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
        dilation: Sequence[int], groups: int, function: int = 0, owners: Any = struct,
    ) -> Tensor | None:  # fmt: skip
        if not in_memory(x) or not x.is_cpu or x.dtype is not dtype or x.ndim not in (3, 4):
            return None
        flat = x.ndim == 3
        stride, padding, dilation = (v if len(v) > 1 else (*v,) * (x.ndim - 2) for v in (stride, padding, dilation))
        if min(stride) < 1 or min(dilation) < 1 or min(padding) < 0 or groups < 1:
            return None
        if flat:
            x, stride, padding, dilation = x.unsqueeze(2), (1, *stride), (0, *padding), (1, *dilation)
        n, channels, *sizes = x.shape
        out = convolution_sizes(sizes, kernel, stride, padding, dilation)
        if channels != c * groups or o % groups or min(out) < 1:
            return None
        b, b_kind = None, 0
        if bias is not None:
            if not in_memory(bias) or not bias.is_cpu or bias.shape != (o,) or not bias.is_floating_point():
                return None
            if bias.dtype not in FLOAT_KINDS or not bias.is_contiguous():
                bias = bias.float().contiguous()
            b, b_kind = bias.data_ptr(), FLOAT_KINDS[bias.dtype]
        kind = torch.contiguous_format if flat else output_format(x)
        if not x.is_contiguous() and not x.is_contiguous(memory_format=_CHANNELS_LAST):
            x = x.contiguous(memory_format=kind)
        y = torch.empty((n, o, *out), dtype=dtype, device="cpu", memory_format=kind)
        if y.numel():
            parts = ((w.codes, w.codes_bytes), (w.scale, w.scale_bytes), *(w.more or ()))
            if any(p is not None and p.nbytes != size for p, size in parts):
                raise changed_part("convolution")
            factor, act_zero, scale = None, 0, w.scale
            if w.static is not None:
                s, scale_dtype, zero, shift = w.static
                act_scale = s.to(scale_dtype).float()
                factor = address(act_scale, "convolution: act_scale", (torch.float32,), 1, exact=True)
                act_zero = (0 if zero is None else int(zero)) - shift
            args = ConvArgs(
                x.data_ptr(), y.data_ptr(), b, w.codes.data_ptr(), None if scale is None else scale.data_ptr(),
                None if w.more is None or w.more[0][0] is None else w.more[0][0].data_ptr(),
                factor, n, *sizes, *out, groups, *stride, *padding, *dilation, act_zero, b_kind, not x.is_contiguous(),
                kind is _CHANNELS_LAST, function, threads(),
            )  # fmt: skip
            status = call(weight, ctypes.addressof(args))
            if status:
                check_status(status, f"convolution: input {list(x.shape)}, weight of {o} channels, kernel {kernel}")
        return y.squeeze(2) if flat else y

    return run
