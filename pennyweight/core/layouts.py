"""Layouts: how parts lie in memory. A layout read by one kernel is declared in that kernel's file.

Layout "bits" packs codes, and zero points that have a format of their own. A kernel's own layout holds those as "plain"
does, a byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import blocks
from .numerics import Parts
from .packing import pack_bits, unpack_bits
from .spec import SPECS, QuantSpec


@dataclass(frozen=True)
class Layout:
    """name; pack(plain parts, spec, shape) -> parts; unpack is its inverse, bit for bit.

    shape is the stored shape of the tensor. ``devices`` None: any. A layout never reaches a file: files hold "bits".
    ``extra`` gives the bytes that it stores beyond the spec's own. ``examples`` are specs and shapes that it takes;
    tests/every/test_layouts.py runs each.
    """

    name: str
    pack: Callable[[Parts, QuantSpec, Sequence[int]], Parts]
    unpack: Callable[[Parts, QuantSpec, Sequence[int]], Parts]
    devices: tuple[str, ...] | None = None
    examples: tuple[tuple[QuantSpec, tuple[int, ...]], ...] = ()
    extra: Callable[[QuantSpec, Sequence[int]], int] = lambda spec, shape: 0

    def nbytes(self, spec: QuantSpec, shape: Sequence[int]) -> int:
        """Bytes of all parts of a tensor of that shape in this layout."""
        return spec.with_(layout=self.name).nbytes(shape) + self.extra(spec, shape)


LAYOUTS: dict[str, Layout] = {}


def register_layout(layout: Layout) -> Layout:
    """Make a layout known by its name. Raises ValueError for a name in use."""
    if layout.name in LAYOUTS:
        raise ValueError(f"layout {layout.name!r} is registered already")
    LAYOUTS[layout.name] = layout
    return layout


def get_layout(name: str) -> Layout:
    """The layout of that name. Raises ValueError that lists the known ones."""
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


READABLE = ("plain", "bits")  # every op reads these row by row; any other layout is one kernel's own


def portable_layout(spec: QuantSpec) -> str:
    """The smallest layout that any op reads row by row and that means the same on every machine."""
    return "bits" if spec.format.bits < 8 else "plain"


def pack_zero_point(part: Any, spec: QuantSpec) -> Any:
    """Zero points as layout "bits" and files hold them: under a format of their own, a stream along the last axis."""
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


_EXAMPLES = tuple((spec, (3, 130)) for spec in SPECS.values())
PLAIN = register_layout(Layout("plain", _identity, _identity, examples=_EXAMPLES))
BITS = register_layout(Layout("bits", _pack, _unpack, examples=_EXAMPLES))
