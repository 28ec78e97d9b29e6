"""Layouts: how parts are stored in memory. A layout read by one kernel is declared in that kernel's file.

Layout "bits" packs codes, and zero points that have their own format, along the last axis; "flat_bits" packs them along
all axes but the first. Kernel layouts store such zero points as "plain" does, one byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..support.arguments import did_you_mean
from . import blocks
from .numerics import Parts
from .packing import flat_rows, pack_bits, saved_by_flat_rows, unpack_bits
from .spec import SPECS, QuantSpec


@dataclass(frozen=True)
class Layout:
    """name; pack(plain parts, spec, shape) -> parts; unpack is its inverse, bit for bit.

    shape is the stored shape of the tensor. ``devices`` None: any. Files use "bits" and "flat_bits", never a kernel
    layout.
    ``extra`` returns the bytes stored in addition to ``spec.nbytes``. ``examples`` are supported specs and shapes;
    tests/every/test_layouts.py runs each. ``from_bits``(parts in layout "bits", spec, shape) returns what ``pack`` does
    for the same parts in layout "plain", without unpacking all codes first; None: there is no such way.
    """

    name: str
    pack: Callable[[Parts, QuantSpec, Sequence[int]], Parts]
    unpack: Callable[[Parts, QuantSpec, Sequence[int]], Parts]
    devices: tuple[str, ...] | None = None
    examples: tuple[tuple[QuantSpec, tuple[int, ...]], ...] = ()
    extra: Callable[[QuantSpec, Sequence[int]], int] = lambda spec, shape: 0
    from_bits: Callable[[Parts, QuantSpec, Sequence[int]], Parts] | None = None

    def nbytes(self, spec: QuantSpec, shape: Sequence[int]) -> int:
        """Bytes of all parts of a tensor of that shape in this layout."""
        return spec.with_(layout=self.name).nbytes(shape) + self.extra(spec, shape)


_LAYOUTS: dict[str, Layout] = {}
_LATER: dict[str, Callable[[], object]] = {}  # name -> imports the file that registers this layout


def register_layout(layout: Layout) -> Layout:
    """Register a layout. Raises ValueError if the name is in use."""
    if layout.name in _LAYOUTS:
        raise ValueError(f"layout {layout.name!r} is registered already")
    _LAYOUTS[layout.name] = layout
    return layout


def register_layout_later(name: str, load: Callable[[], object]) -> None:
    """Register a layout by the function that imports the file of its :func:`register_layout`, called at first use."""
    _LATER[name] = load


def get_layout(name: str) -> Layout:
    """The layout with that name. Raises ValueError listing the known layouts."""
    if name not in _LAYOUTS and name in _LATER:
        _LATER[name]()
    if name not in _LAYOUTS:
        known = list(dict.fromkeys((*_LAYOUTS, *_LATER)))
        raise ValueError(f"unknown layout {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return _LAYOUTS[name]


def layouts() -> list[Layout]:
    """All layouts."""
    return [get_layout(name) for name in dict.fromkeys((*_LAYOUTS, *_LATER))]


def change_layout(parts: Parts, spec: QuantSpec, layout: str, shape: Sequence[int]) -> Parts:
    """Parts of a tensor under ``spec`` in another layout; exact. Raises ValueError if it does not support the spec."""
    source, target = get_layout(spec.layout), get_layout(layout)
    wanted = spec.with_(layout=layout)
    if source is BITS and target.from_bits is not None:
        return target.from_bits(parts, wanted, shape)
    return target.pack(source.unpack(parts, spec, shape), wanted, shape)


READABLE = ("plain", "bits")  # every op reads these row by row; any other layout belongs to one kernel


def portable_layout(spec: QuantSpec) -> str:
    """The smallest layout that every op reads row by row and that is the same on every machine."""
    return "bits" if spec.format.bits < 8 else "plain"


def compact_layout(spec: QuantSpec, shape: Sequence[int]) -> str:
    """The smallest layout that is the same on every machine: :func:`portable_layout`, or "flat_bits" for short last
    axes. shape: stored shape of the tensor."""
    return "flat_bits" if saved_by_flat_rows(spec.codes_shape(shape), spec.format.bits) else portable_layout(spec)


def pack_zero_point(part: Any, spec: QuantSpec) -> Any:
    """Zero points as stored in layout "bits" and in files: with their own format, a bit stream along the last axis."""
    bits = spec.zero_point_bits
    return part if part is None or bits == 8 else pack_bits(spec.zero_point_format.to_unsigned(part), bits)


def unpack_zero_point(part: Any, spec: QuantSpec, shape: Sequence[int]) -> Any:
    """Inverse of :func:`pack_zero_point`. shape: stored shape of the tensor."""
    bits = spec.zero_point_bits
    if part is None or bits == 8:
        return part
    n = blocks.counts(spec.block, shape)[-1] if shape else 1
    return spec.zero_point_format.from_unsigned(unpack_bits(part, bits, n))


def _identity(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    return parts


def _pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    codes = pack_bits(spec.format.to_unsigned(parts.codes), spec.format.bits)
    return parts._replace(codes=codes, zero_point=pack_zero_point(parts.zero_point, spec))


def _unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    n = spec.codes_shape(shape)[-1] if shape else 1
    codes = spec.format.from_unsigned(unpack_bits(parts.codes, spec.format.bits, n))
    return parts._replace(codes=codes, zero_point=unpack_zero_point(parts.zero_point, spec, shape))


def _pack_flat(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    return _pack(parts._replace(**{slot: p.reshape(flat_rows(p.shape)) for slot, p in _streams(parts, spec)}), spec, ())


def _unpack_flat(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    sizes = {"codes": spec.codes_shape(shape), "zero_point": blocks.counts(spec.block, shape)}
    kinds = {"codes": spec.format, "zero_point": spec.zero_point_format}
    for slot, stream in _streams(parts, spec):
        size, f = sizes[slot], kinds[slot]
        codes = f.from_unsigned(unpack_bits(stream, f.bits, flat_rows(size)[-1]))
        parts = parts._replace(**{slot: codes.reshape(size)})
    return parts


def _streams(parts: Parts, spec: QuantSpec) -> list[tuple[str, Any]]:
    """The parts that layouts of bit streams pack."""
    packed = parts.zero_point is not None and spec.zero_point_bits < 8
    return [("codes", parts.codes), *([("zero_point", parts.zero_point)] if packed else [])]


_EXAMPLES = tuple((spec, (3, 130)) for spec in SPECS.values())
PLAIN = register_layout(Layout("plain", _identity, _identity, examples=_EXAMPLES))
BITS = register_layout(Layout("bits", _pack, _unpack, examples=_EXAMPLES))
_FLAT_EXAMPLES = tuple((spec, shape) for spec in SPECS.values() for shape in ((3, 130), (3, 5, 3, 3), (4, 8, 1)))
FLAT_BITS = register_layout(Layout("flat_bits", _pack_flat, _unpack_flat, examples=_FLAT_EXAMPLES))


def require_fit(layout: str, verdict: bool | str, spec: QuantSpec, shape: Sequence[int]) -> None:
    """Raise ValueError unless ``verdict`` is True; it is the reason why a kernel's layout does not support a tensor."""
    if verdict is not True:
        raise ValueError(f'layout "{layout}" of {tuple(shape)} {spec}: {verdict}')


# -- moved tensors: which layout a kernel on a device wants, the kernels know; without them all are portable -----------


def _same_type(devices: tuple[str, ...], device: torch.device) -> bool:
    return device.type in devices


def _as_it_is(w: Any, packed_for: str | None) -> Any:
    return w


_FITS: list[Callable[[tuple[str, ...], torch.device], bool]] = [_same_type]
_PACK: list[Callable[[Any, str | None], Any]] = [_as_it_is]


def register_packing(
    fits: Callable[[tuple[str, ...], torch.device], bool], pack: Callable[[Any, str | None], Any]
) -> None:
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
