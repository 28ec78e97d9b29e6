"""Base of torchao's classes of optimizer states, as views of our quantized tensors.

torchao's blocks are ``block_size`` neighbours of the flattened tensor. Ours are part of one axis, or whole entries of
an axis; a block of torchao's that is neither is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight.core.formats import Format
from pennyweight.core.numerics import Parts
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao.tensor_class import View, attributes, become

__all__: list[str] = []


def flat_block(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Blocks of ``size`` neighbours of the flattened tensor, as a block of the last axes. Raises ValueError if there is
    none: if a block would end within an entry of an axis and continue in the next."""
    axis, inner = len(shape) - 1, 1
    while axis > 0 and size % (inner * shape[axis]) == 0:
        inner *= shape[axis]
        axis -= 1
    entries = size // inner if inner else 0
    if size < 1 or size % inner or (shape and shape[axis] % entries):
        raise ValueError(
            f"an optimizer state {list(shape)} in blocks of {size} flattened elements: blocks that end within one "
            f"entry of an axis and continue in the next are not supported; use a block_size that divides {shape[-1]}"
        )
    block = (entries, *[-1] * (len(shape) - 1 - axis))
    return block[1:] if entries == 1 and len(block) > 1 else block


class OptimState(View):
    """x = map[codes] * scale. A subclass lists the formats that it can represent, and the numbers of its maps."""

    FORMATS: ClassVar[frozenset[Format]]
    tensor_data_names: ClassVar[list[str]] = ["codes", "scale", "qmap"]
    tensor_attribute_names: ClassVar[list[str]] = ["signed"]
    optional_tensor_attribute_names: ClassVar[list[str]] = ["dtype"]

    @classmethod
    def holds(cls, w: QT) -> bool:  # type: ignore[override]
        return w.spec.format in cls.FORMATS and w.spec.scale is torch.float32 and w.spec.offset is None

    def __setstate__(self, state: Any) -> None:
        """As that of views of weights, without a layout for kernels."""
        become(self, type(self).restore(attributes(state), self))

    @classmethod
    def make(
        cls, codes: Tensor, scale: Tensor, fmt: Format, shape: Sequence[int], dtype: torch.dtype | None, layout: str
    ) -> QT:
        """Our tensor from stored codes and one scale per block."""
        shape = tuple(shape)
        count = scale.numel()
        if scale.ndim != 1 or not count or math.prod(shape) % count:
            raise AssertionError(
                f"{cls.__name__}: scale must have one axis, with one number per block of the {math.prod(shape)} codes, "
                f"got {list(scale.shape)}"
            )
        block = flat_block(shape, math.prod(shape) // count)
        spec = QuantSpec(fmt, block, torch.float32, layout=layout)
        counts = tuple(1 if b == -1 else n // b for b, n in zip(_aligned(block, shape), shape, strict=True))
        return QT(Parts(codes, scale.view(counts)), spec, shape, dtype or torch.get_default_dtype())

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        """torchao's members of a state: codes one per element, a scale per block of the flattened tensor."""
        fmt = w.spec.format
        assert w.scale is not None
        return {
            "codes": w.codes, "scale": w.scale.reshape(-1), "qmap": qmap_of(w), "signed": fmt.lo < 0, "dtype": w.dtype,
        }  # fmt: skip


def _aligned(block: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The block with a number for each axis."""
    return (1,) * (len(shape) - len(block)) + block


def qmap_of(w: QT) -> Tensor:
    """The numbers of the codes of a state, float32. Raises AttributeError for formats without a map."""
    if w.spec.format.kind != "table":
        raise AttributeError(f"qmap: codes of {w.spec.format} are numbers themselves")
    return torch.tensor(w.spec.format.values, dtype=torch.float32, device=w.device)


def format_of(qmap: Tensor, formats: Sequence[Format], name: str) -> Format:
    """The format with the numbers of a map; else the nearest that differs in the last bits of float32 only. Raises
    ValueError for another map."""
    assert qmap.dtype is torch.float32, f"{name}: qmap must be float32, got {qmap.dtype}"
    given = qmap.detach().cpu()
    maps = [torch.tensor(f.values, dtype=torch.float32, device="cpu") for f in formats]
    alike = [f for f, m in zip(formats, maps, strict=True) if m.shape == given.shape and torch.equal(m, given)]
    alike += [
        f for f, m in zip(formats, maps, strict=True)
        if m.shape == given.shape and torch.allclose(m, given, rtol=1e-6, atol=0)
    ]  # fmt: skip
    if not alike:
        raise ValueError(
            f"{name}: unknown qmap of {given.numel()} numbers from {float(given.min()):g} to {float(given.max()):g}; "
            f"use get_qmap_signed() or get_qmap_unsigned() of this module"
        )
    return alike[0]


QT.qmap = property(qmap_of, doc="The numbers of the codes of an optimizer state, in torchao's terms.")  # type: ignore[attr-defined]
QT.signed = property(lambda w: w.spec.format.lo < 0, doc="Whether the format has negative numbers.")  # type: ignore[attr-defined]
