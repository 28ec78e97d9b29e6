"""The registration point of pennyweight/kernels, which packs a quantized tensor for the device that it is moved to.

core knows types of devices only. What a device can read, and which layout a kernel on it wants, the kernels know:
:func:`register` is called once, by them. Without them every tensor arrives in a portable layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .layouts import get_layout


def _same_type(devices: tuple[str, ...], device: torch.device) -> bool:
    return device.type in devices


def _as_it_is(w: Any, packed_for: str | None) -> Any:
    return w


_FITS: list[Callable[[tuple[str, ...], torch.device], bool]] = [_same_type]
_PACK: list[Callable[[Any, str | None], Any]] = [_as_it_is]


def register(fits: Callable[[tuple[str, ...], torch.device], bool], pack: Callable[[Any, str | None], Any]) -> None:
    """Register the two questions to the kernels.

    fits  (entries of ``Layout.devices``, device) -> whether the device is one of them
    pack  (a tensor in a portable layout, just moved to another device; the layout that it had there, if that was a
          kernel's) -> the same tensor, in the layout of the kernel that will read it
    """
    _FITS[:], _PACK[:] = [fits], [pack]


def reads_layout(layout: str, device: torch.device) -> bool:
    """Whether kernels on a device read this layout; True for layouts that are the same on every machine."""
    devices = get_layout(layout).devices
    return devices is None or _FITS[0](devices, device)


def pack_on_arrival(w: Any, before: str) -> Any:
    """w, just moved to another device, packed for the kernel that will read it. before: its layout on the other."""
    return _PACK[0](w, before if get_layout(before).devices is not None else None)
