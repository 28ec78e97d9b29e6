"""QuantSpec: how a quantized tensor is stored. Static, hashable, serializable to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..support.arguments import check_choice, show
from ..support.errors import ArgumentTypeError
from . import blocks
from .formats import (
    DYNAMIC8,
    E2M1,
    E2M3,
    E4M3,
    E8M0,
    INT3,
    INT4,
    INT6,
    INT8,
    NF4,
    TERNARY,
    UFLOAT4,
    UFLOAT8,
    UINT2,
    UINT4,
    UINT5,
    UINT6,
    Format,
    get_format,
)
from .formats import IQ4_NL as IQ4_NL_VALUES
from .packing import flat_rows, stream_shape

SPEC_VERSION = 2  # newest version that is read; the oldest sufficient version is written, see QuantSpec.version
# Dtypes named in files are looked up only in this fixed table.
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_DTYPE_NAMES = {v: k for k, v in DTYPES.items()}
SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is stored. The value of each element, with parts broadcast over their blocks:

        x = (decode(codes) - mid - zero_point) * scale + offset

    format      number format of the codes; decode() of a learned format uses the tensor's own part ``table``
    block       elements that share a scale, right-aligned to the shape; -1: the whole axis; None: the whole tensor
    scale       dtype of the scale, or a QuantSpec if the scale is itself quantized; None: no scale (1)
    zero_point  whether an integer zero point, in code units, is stored per block. True: one byte each, in the range of
                the codes. An integer format: the range of the zero points, which are packed wherever codes are packed
    offset      dtype or QuantSpec of a real offset in value units, per block; None: no offset
    mid         a constant zero point in code units that is not stored (8 for a uint4 centred on zero)
    layout      how the parts are stored in memory; "plain" is one code per element
    """

    format: Format
    block: tuple[int, ...] | None = None
    scale: QuantSpec | torch.dtype | None = torch.float32
    zero_point: bool | Format = False
    offset: QuantSpec | torch.dtype | None = None
    mid: int = 0
    layout: str = "plain"

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise ArgumentTypeError(
                f"QuantSpec: format must be a Format such as pw.get_format('int4'), got {show(self.format)}"
            )
        object.__setattr__(self, "block", blocks.normalize(self.block))
        object.__setattr__(self, "zero_point", self._zero_point())
        for name in ("scale", "offset"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, QuantSpec) or value in _DTYPE_NAMES):
                raise ValueError(
                    f"QuantSpec.{name} must be a float dtype such as torch.float16, or a QuantSpec, got {show(value)}"
                )
        if self.scale is None and (self.zero_point or self.offset is not None):
            raise ValueError("QuantSpec without a scale cannot have zero_point or offset; give scale a dtype")
        if self.zero_point and self.format.kind != "int":
            raise ValueError(f"zero_point is in code units and needs an integer format, got {self.format}; use offset")
        if self.zero_point and (self.offset is not None or self.mid):
            raise ValueError("QuantSpec takes either zero_point, or offset and mid: both define which code means zero")
        for name in ("scale", "offset"):
            value = getattr(self, name)
            if isinstance(value, QuantSpec) and value.format.kind == "learned":
                raise ValueError(f"QuantSpec.{name}: its numbers cannot be learned, got {value.format}")
        if self.block is not None and self.block[-1] % self.format.dim and self.block[-1] != -1:
            raise ValueError(
                f"QuantSpec: block size {self.block[-1]} is not a multiple of {self.format.dim}, the numbers per code "
                f"of {self.format}"
            )
        if self.mid and not (self.format.kind == "int" and self.format.lo <= self.mid <= self.format.hi):
            raise ValueError(
                f"QuantSpec.mid must be one of the codes of an integer format, got {self.mid} for {self.format}"
            )

    def _zero_point(self) -> bool | Format:
        """``zero_point`` in canonical form: a format equal to the 8-bit format of the codes becomes True."""
        zero, f = self.zero_point, self.format
        if not isinstance(zero, Format):
            return bool(zero)
        if f.kind == "int" and not (  # zero points of other formats are rejected above
            zero.kind == "int" and zero.code_dtype is f.code_dtype and zero.lo <= f.lo <= f.hi <= zero.hi
        ):
            raise ValueError(
                f"QuantSpec.zero_point: {zero} does not cover all codes of {f}; use {f}, a wider format, or True"
            )
        return True if zero is f and f.bits == 8 else zero

    def __str__(self) -> str:
        block = "tensor" if self.block is None else ",".join("*" if b == -1 else str(b) for b in self.block)
        text = f"{self.format}[{block}]"
        for name in ("scale", "offset"):
            value = getattr(self, name)
            if value is not None:
                text += f" {name}={SHORT[value] if isinstance(value, torch.dtype) else f'({value})'}"
        if self.zero_point:
            text += f" zero_point{'' if self.zero_point is True else f'={self.zero_point}'}"
        if self.mid:
            text += f" mid={self.mid}"
        return text if self.layout == "plain" else f"{text} layout={self.layout}"

    def with_(self, **changes: Any) -> QuantSpec:
        """A copy of this spec with some fields changed."""
        return replace(self, **changes)

    def part_specs(self) -> dict[str, QuantSpec | torch.dtype]:
        """Stored parts other than the codes, with the dtype or spec of each."""
        parts: dict[str, QuantSpec | torch.dtype] = {}
        if self.scale is not None:
            parts["scale"] = self.scale
        if self.zero_point:
            parts["zero_point"] = self.zero_point_dtype
        if self.offset is not None:
            parts["offset"] = self.offset
        return parts

    @property
    def one_sided(self) -> bool:
        """Whether all numbers of a block have the sign of its scale. For such an offset the scale is not positive."""
        return self.format.lo >= 0 and not (self.mid or self.zero_point or self.offset is not None)

    @property
    def zero_point_dtype(self) -> torch.dtype:
        """Dtype of unpacked zero points; by default that of the codes."""
        return self.zero_point_format.code_dtype

    @property
    def zero_point_format(self) -> Format:
        """Number format of the zero points."""
        return self.zero_point if isinstance(self.zero_point, Format) else self.format

    @property
    def zero_point_bits(self) -> int:
        """Bits of a stored zero point in files and in layouts of bit streams; 8: one byte in the dtype of the codes."""
        return self.zero_point.bits if isinstance(self.zero_point, Format) else 8

    @property
    def version(self) -> int:
        """The oldest JSON version that can represent this spec."""
        nested = [k.version for k in (self.scale, self.offset) if isinstance(k, QuantSpec)]
        return max([2 if isinstance(self.zero_point, Format) or self.format.kind == "learned" else 1, *nested])

    @property
    def table_shape(self) -> tuple[int, int] | None:
        """Shape of the part ``table``, [codes, numbers per code]; None if the format is not learned."""
        return (1 << self.format.bits, self.format.dim) if self.format.kind == "learned" else None

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of plain codes: padded to whole blocks, one code per ``format.dim`` neighbours on the last axis."""
        whole, dim = blocks.padded(self.block, shape), self.format.dim
        if dim == 1:
            return whole
        if not whole:
            raise ValueError(f"{self}: a 0-d tensor cannot have codes that represent {dim} numbers")
        return (*whole[:-1], -(-whole[-1] // dim))

    @property
    def is_stream(self) -> bool:
        """Whether the layout stores codes, and zero points with their own format, as bit streams."""
        return self.layout in ("bits", "flat_bits")

    def stream_shape(self, shape: Sequence[int], bits: int) -> tuple[int, ...]:
        """Shape of the bytes of a bit stream of codes of that shape in this layout."""
        return stream_shape(flat_rows(shape) if self.layout == "flat_bits" else shape, bits)

    def row_length(self, shape: Sequence[int]) -> int:
        """Codes in one row of the codes or zero points of that shape, which a bit stream packs together."""
        return (flat_rows(shape) if self.layout == "flat_bits" else shape)[-1] if shape else 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of all parts of a tensor of that shape. Codes take one byte (layout "plain") or ``bits`` bits each,
        zero points one byte, or in layouts of bit streams the bits of their format."""
        total = math.prod(self.stream_shape(self.codes_shape(shape), 8 if self.layout == "plain" else self.format.bits))
        part_shape = blocks.counts(self.block, shape)
        for slot, kind in self.part_specs().items():
            if slot == "zero_point" and self.is_stream and self.zero_point_bits < 8:
                total += math.prod(self.stream_shape(part_shape, self.zero_point_bits))
            else:
                n_blocks = math.prod(part_shape)
                total += kind.nbytes(part_shape) if isinstance(kind, QuantSpec) else n_blocks * kind.itemsize
        return total + (0 if self.table_shape is None else 2 * math.prod(self.table_shape))

    def rows_independent(self, shape: Sequence[int]) -> bool:
        """Whether x[a:b] of a tensor of that shape can be quantized on its own: rows share no part, at any depth."""
        if self.format.kind == "learned":  # all rows share the table
            return False
        inner = blocks.counts(self.block, shape)
        nested = [k for k in (self.scale, self.offset) if isinstance(k, QuantSpec)]
        return blocks.resolve(self.block, shape)[0] == 1 and all(k.rows_independent(inner) for k in nested)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; see docs/format.md."""
        data: dict[str, Any] = {
            "format": self.format.name,
            "block": None if self.block is None else list(self.block),
            "scale": _part_to_data(self.scale),
        }
        if self.zero_point:
            data["zero_point"] = self.zero_point.name if isinstance(self.zero_point, Format) else True
        if self.offset is not None:
            data["offset"] = _part_to_data(self.offset)
        if self.mid:
            data["mid"] = self.mid
        if self.layout != "plain":
            data["layout"] = self.layout
        return data

    @classmethod
    def from_dict(cls, data: Any) -> QuantSpec:
        """Inverse of :meth:`to_dict`. Raises ValueError on missing or unknown keys and on wrong types."""
        check_keys("QuantSpec", data, required={"format", "block", "scale"}, optional=_OPTIONAL)
        block = data["block"]
        if block is not None and not (isinstance(block, list) and all(type(b) is int for b in block)):
            raise ValueError(f"QuantSpec.block must be null or a list of integers, got {block!r}")
        zero = data.get("zero_point", False)
        kinds = (("format", str), ("zero_point", str if isinstance(zero, str) else bool), ("mid", int), ("layout", str))
        for key, kind in kinds:
            if key in data and type(data[key]) is not kind:
                raise ValueError(f"QuantSpec.{key} must be {kind.__name__}, got {data[key]!r}")
        return cls(
            get_format(data["format"]),
            None if block is None else tuple(block),
            _part_from_data(data["scale"]),
            get_format(zero) if isinstance(zero, str) else zero,
            _part_from_data(data.get("offset")),
            data.get("mid", 0),
            data.get("layout", "plain"),
        )

    def to_json(self) -> str:
        """Versioned JSON."""
        return json.dumps({"version": self.version, **self.to_dict()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> QuantSpec:
        """Inverse of :meth:`to_json`. Raises ValueError on a newer version or malformed data."""
        data = json.loads(text)
        version = data.pop("version", None) if isinstance(data, dict) else None
        if type(version) is not int or not 1 <= version <= SPEC_VERSION:
            raise ValueError(f"QuantSpec version {version!r}; this release reads 1 to {SPEC_VERSION}")
        spec = cls.from_dict(data)
        if spec.version > version:
            raise ValueError(f"QuantSpec declares version {version}, but its fields need version {spec.version}")
        return spec


_OPTIONAL = {"zero_point", "offset", "mid", "layout"}


@dataclass(frozen=True)
class ActivationSpec:
    """How the input of an op is quantized: per call ("dynamic") or with stored parameters ("static").

    rule and eps: see :func:`pennyweight.core.qparams.choose`. The block applies to the input; [-1] is per token.
    A static spec with quantized scales (NVFP4) stores the scale of the scales; block scales are chosen per call.
    """

    spec: QuantSpec
    mode: str = "dynamic"
    rule: str | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.spec, QuantSpec):
            raise ArgumentTypeError(
                f"ActivationSpec: spec must be a QuantSpec such as QuantSpec(pw.get_format('int8'), (-1,)), got "
                f"{show(self.spec)}"
            )
        check_choice("ActivationSpec.mode", self.mode, ("dynamic", "static"))
        above = self.spec.scale
        if self.mode == "static" and isinstance(above, QuantSpec) and (
            above.scale is None or above.block is not None or above.offset is not None
        ):  # fmt: skip
            raise ValueError(
                f"ActivationSpec: static inputs store one number, the scale of the scales; the scales of {self.spec} "
                'do not have one. Use mode "dynamic"'
            )
        if isinstance(self.spec.zero_point, Format):  # packing a single number saves nothing
            if self.spec.zero_point is not self.spec.format:
                raise ValueError(f"ActivationSpec: zero points must be in the range of the codes, got {self.spec}")
            object.__setattr__(self, "spec", self.spec.with_(zero_point=True))

    @property
    def has_fixed_range(self) -> bool:
        """Whether one stored scale determines the range of all values: static, without block scales of their own."""
        return self.mode == "static" and not isinstance(self.spec.scale, QuantSpec)

    def __str__(self) -> str:
        return f"{self.mode} {self.spec}"

    def to_dict(self) -> dict[str, Any]:
        return {"spec": self.spec.to_dict(), "mode": self.mode, "rule": self.rule, "eps": self.eps}

    @classmethod
    def from_dict(cls, data: Any) -> ActivationSpec:
        check_keys("ActivationSpec", data, required={"spec", "mode"}, optional={"rule", "eps"})
        rule, eps = data.get("rule"), data.get("eps")
        if not (rule is None or isinstance(rule, str)) or not (eps is None or type(eps) in (int, float)):
            raise ValueError(f"ActivationSpec: rule must be a name and eps a number, got {rule!r} and {eps!r}")
        return cls(QuantSpec.from_dict(data["spec"]), data["mode"], rule, eps)


def check_keys(what: str, data: Any, required: set[str], optional: set[str]) -> None:
    """Raise ValueError unless ``data`` is a dict with exactly the known keys."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object, got {type(data).__name__}")
    missing, unknown = required - data.keys(), data.keys() - required - optional
    if missing or unknown:
        raise ValueError(f"{what}: missing {sorted(missing)}, unknown {sorted(map(str, unknown))}")


def _part_to_data(value: QuantSpec | torch.dtype | None) -> Any:
    return value.to_dict() if isinstance(value, QuantSpec) else None if value is None else _DTYPE_NAMES[value]


def _part_from_data(data: Any) -> QuantSpec | torch.dtype | None:
    if data is None:
        return None
    if isinstance(data, str):
        if data not in DTYPES:
            raise ValueError(f"unknown dtype {data!r}; known: {', '.join(DTYPES)}")
        return DTYPES[data]
    return QuantSpec.from_dict(data)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a float dtype in files."""
    return _DTYPE_NAMES[dtype]


# Named quantization schemes, one per line.
TENSOR = None
INT8_ROW = QuantSpec(INT8, (-1,))
INT8_ROW_ASYMMETRIC = QuantSpec(INT8, (-1,), zero_point=True)
INT4_GROUP = QuantSpec(INT4, (32,))
UINT4_GROUP = QuantSpec(UINT4, (64,), scale=torch.bfloat16, zero_point=True)
UINT4_ZEROS = QuantSpec(UINT4, (128,), scale=torch.float16, zero_point=UINT4)  # GPTQ's and AWQ's: 4.156 bits a weight
TINYGEMM = QuantSpec(UINT4, (128,), scale=torch.bfloat16, offset=torch.bfloat16, mid=8)
FP8_ROW = QuantSpec(E4M3, (-1,))
FP8_TENSOR = QuantSpec(E4M3, TENSOR)
FP8_BLOCK = QuantSpec(E4M3, (128, 128))  # DeepSeek-V3 (2024)
MXFP8 = QuantSpec(E4M3, (32,), scale=QuantSpec(E8M0, (1,), scale=None))
MXFP6 = QuantSpec(E2M3, (32,), scale=QuantSpec(E8M0, (1,), scale=None))
MXFP4 = QuantSpec(E2M1, (32,), scale=QuantSpec(E8M0, (1,), scale=None))
NVFP4 = QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, TENSOR))
NF4_BLOCK = QuantSpec(NF4, (64,))
NF4_DOUBLE = QuantSpec(NF4, (64,), scale=QuantSpec(INT8, (256,), offset=torch.float32))
TERNARY_TENSOR = QuantSpec(TERNARY, TENSOR)  # BitNet b1.58 (2024)
ADAM8 = QuantSpec(DYNAMIC8, (256,))
ADAM8_SQUARES = QuantSpec(UFLOAT8, (256,))  # the second moment has no sign, and must not become zero
ADAM4 = QuantSpec(NF4, (64,), layout="bits")
ADAM4_SQUARES = QuantSpec(UFLOAT4, (64,), layout="bits")
ADAM_FP8 = QuantSpec(E4M3, (256,))
# ggml's block types; K-quants have one float16 per 256 elements. Offsets are never positive.
Q4_0 = QuantSpec(UINT4, (32,), scale=torch.float16, mid=8)
Q4_1 = QuantSpec(UINT4, (32,), scale=torch.float16, offset=torch.float16)
Q5_0 = QuantSpec(UINT5, (32,), scale=torch.float16, mid=16)
Q5_1 = QuantSpec(UINT5, (32,), scale=torch.float16, offset=torch.float16)
Q8_0 = QuantSpec(INT8, (32,), scale=torch.float16)
_K4, _K6 = (QuantSpec(f, (n,), scale=torch.float16) for f, n in ((UINT4, 16), (UINT6, 8)))
Q2_K = QuantSpec(UINT2, (16,), scale=_K4, offset=_K4)
Q3_K = QuantSpec(INT3, (16,), scale=QuantSpec(INT6, (16,), scale=torch.float16))
Q4_K = QuantSpec(UINT4, (32,), scale=_K6, offset=_K6)
Q5_K = QuantSpec(UINT5, (32,), scale=_K6, offset=_K6)
Q6_K = QuantSpec(INT6, (16,), scale=QuantSpec(INT8, (16,), scale=torch.float16))
IQ4_NL = QuantSpec(IQ4_NL_VALUES, (32,), scale=torch.float16)
IQ4_XS = QuantSpec(IQ4_NL_VALUES, (32,), scale=QuantSpec(INT6, (8,), scale=torch.float16))
TERNARY_256 = QuantSpec(TERNARY, (256,), scale=torch.float16)  # TQ1_0 and TQ2_0
SPECS = {
    name.lower(): value
    for name, value in tuple(globals().items())
    if isinstance(value, QuantSpec) and not name.startswith("_")
}
