"""Checks of what GPU kernels are given, and the device that they run on.

A GPU kernel gets addresses and sizes and trusts them; a wrong one reads other tensors or ends the process' context. So
tensors are passed through :func:`aligned` (parts of a weight, once), :func:`rows` (an input, at each call) and
:func:`vector` (a bias), which raise :class:`~pennyweight.support.errors.ArgumentError` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.call_site import in_layer
from ..core.tracing import is_observed
from ..support.errors import ArgumentError

ALIGNMENT = 16  # bytes of the widest load; of another address Triton would compile a second variant
_INT32 = 1 << 31
_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_GUARDED = ("cuda", "xpu")  # types of devices with a current one, on whose stream a kernel is launched


def aligned(
    t: Tensor | None,
    name: str,
    dtype: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int | None],
    device: torch.device,
    *,
    wide: bool = False,
) -> Tensor:
    """t as a GPU kernel may read it: plain, contiguous, at a multiple of 16 bytes; copied if only these fail.

    name    in errors: "codes", "scale"
    dtype   the one, or those, that the kernel reads
    shape   the exact sizes; None: any
    device  with its index
    wide    whether the kernel computes offsets in 64 bits; else a tensor of 2**31 elements or more is an error

    Raises ArgumentError that names the layer, what was expected and what was passed.
    """
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if t is None:
        raise ArgumentError(f"{name}{in_layer()}: missing, expected {_expected(dtypes, shape, device)}")
    if t.device != device:
        raise _unfit(
            t, name, dtypes, shape, device, f"move it: {name}.to({str(device)!r}); module.to moves all parts of a layer"
        )
    if t.dtype not in dtypes or t.layout is not torch.strided or not _same(t.shape, shape):
        raise _unfit(t, name, dtypes, shape, device, "was a part of a quantized tensor resized or replaced?")
    if not wide and t.numel() >= _INT32:
        raise _unfit(t, name, dtypes, shape, device, "this kernel reads fewer than 2**31 elements; split the layer")
    if not t.is_contiguous() or t.is_neg() or t.is_conj():
        t = t.resolve_neg().resolve_conj().contiguous()
    return t if _is_aligned(t) else t.clone()


def rows(x: Tensor, k: int, dtypes: Sequence[torch.dtype], device: torch.device, *, wide: bool = False) -> Tensor:
    """The input [.., K] of a product as [M, K], as :func:`aligned`."""
    if x.ndim == 0 or x.shape[-1] != k:
        raise _unfit(x, "input", dtypes, (None, k), device, f"the last axis of the input must be {k}")
    flat = x if x.ndim == 2 else x.reshape(-1, k)
    return aligned(flat, "input", dtypes, (None, k), device, wide=wide)


def vector(t: Tensor | None, name: str, n: int, dtypes: Sequence[torch.dtype], device: torch.device) -> Tensor | None:
    """A bias [n] or None, as :func:`aligned`."""
    return None if t is None else aligned(t, name, dtypes, (n,), device)


def linear_arguments(
    x: Tensor, bias: Tensor | None, n: int, k: int, dtype: torch.dtype, device: torch.device, perm: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """x [.., K] in the order of the weight's columns, and bias [N] or None, as a kernel of ``linear`` may read them.

    None: it cannot, or a mode, tracer or transform must see the call; the caller goes through torch's dispatcher or
    raises the error. perm [K]: the order, or None.
    """
    if (  # hot path, runs per layer and call
        type(x) not in _PLAIN or x.dtype is not dtype or x.device != device or x.layout is not torch.strided
        or x.is_neg() or x.ndim == 0 or x.shape[-1] != k or is_observed(x, bias)
    ):  # fmt: skip
        return None
    if bias is not None:
        if (
            type(bias) not in _PLAIN or bias.dtype not in _FLOATS or bias.shape != (n,) or bias.device != device
            or bias.layout is not torch.strided or bias.is_neg()
        ):  # fmt: skip
            return None
        if not readable(bias):
            bias = aligned(bias, "bias", _FLOATS, (n,), device)
    if perm is not None:
        x = x.index_select(-1, perm)
    return (x if readable(x) else rows(x, k, (dtype,), device, wide=True)), bias


def linear_kernel(
    product: Callable[[Tensor, Any, Tensor | None], Tensor], n: int, k: int, dtype: torch.dtype
) -> Callable[[Tensor, Any, Tensor | None], Tensor | None]:
    """run(x [.., K], operand, bias) of a kernel: ``product`` gives y [M, N] for x [M, K] and bias as
    :func:`linear_arguments` checks them, at least one row. operand: has ``device`` and ``perm``."""

    def run(x: Tensor, w: Any, bias: Tensor | None) -> Tensor | None:
        axes = x.shape
        given = linear_arguments(x, bias, n, k, dtype, w.device, w.perm)
        if given is None:
            return None
        x, bias = given
        if not x.numel():
            return x.new_empty((*axes[:-1], n))
        return product(x.view(-1, k), w, bias).view(*axes[:-1], n)

    return run


def readable(t: Tensor) -> bool:
    """Whether a kernel may read a plain tensor as it is: contiguous, at a multiple of 16 bytes."""
    return t.is_contiguous() and not t.data_ptr() % ALIGNMENT


def _is_aligned(t: Tensor) -> bool:
    """Whether the address is a multiple of 16 bytes; True if it has none: fake tensors."""
    if type(t) not in (Tensor, torch.nn.Parameter):
        return True
    return t.is_meta or not t.data_ptr() % ALIGNMENT


def _same(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _expected(dtypes: Sequence[torch.dtype], shape: Sequence[int | None], device: torch.device) -> str:
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    return f"[{sizes}] {' or '.join(str(d).removeprefix('torch.') for d in dtypes)} on {device}"


def _unfit(
    t: Tensor, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None], device: torch.device, remedy: str
) -> ArgumentError:
    got = f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
    return ArgumentError(f"{name}{in_layer()}: expected {_expected(dtypes, shape, device)}, got {got}; {remedy}")


def on_device(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``run`` with ``device`` as the current one: a kernel is launched on the current device and stream, and would read
    the addresses of another device there. ``run`` itself for CPUs."""
    if device.type not in _GUARDED:
        return run
    module, index = torch.get_device_module(device), device.index

    def guarded(*args: Any) -> Any:
        if index is None or module.current_device() == index:
            return run(*args)
        with module.device(index):
            return run(*args)

    return guarded
