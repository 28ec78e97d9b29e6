"""Every named number scheme, and one of each number format, on values and shapes that break quantizers."""

import itertools
import json
import math
import pickle
import re
from collections.abc import Callable
from ctypes import ArgumentError

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from pennyweight.core import blocks
from pennyweight.core.formats import E4M3, E8M0, INT4, UINT4, UINT5, UINT8, all_formats
from pennyweight.core.numerics import Params, Parts, dequantize, part_value, quantize
from pennyweight.core.spec import SPECS, ActivationSpec, QuantSpec
from pennyweight.core.storage import REFUSAL
from pennyweight.core.tensor import AffineQuantizedTensor as QT


def enrolled() -> dict[str, QuantSpec]:
    """Named specs, and each format by itself, with a zero point, with an offset, and with 16-bit parts."""
    specs = dict(SPECS)
    for fmt in all_formats():
        if fmt is E8M0:
            continue  # a number of its own, not a code under a scale: it is enrolled as the scale of the MX specs
        specs[f"{fmt}"] = QuantSpec(fmt, (16,))
        specs[f"{fmt}-offset-f16"] = QuantSpec(fmt, (16,), torch.float16, offset=torch.float16)
        if fmt.kind == "int":
            specs[f"{fmt}-zero_point"] = QuantSpec(fmt, (16,), zero_point=True)
            if fmt.bits < 8:
                specs[f"{fmt}-zero_point={fmt}"] = QuantSpec(fmt, (8,), torch.float16, zero_point=fmt)
            if not fmt.signed:
                specs[f"{fmt}-mid"] = QuantSpec(fmt, (16,), torch.bfloat16, mid=1 << (fmt.bits - 1))
    return specs


ENROLLED = enrolled()
SPEC = pytest.mark.parametrize("spec", ENROLLED.values(), ids=ENROLLED)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def mixed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def outlier(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape) * 1e-3
    x[..., -1] = -1e4
    return x.to(dtype)


def largest(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)
    x[..., ::2] *= -1
    return x


def subnormal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    x = torch.full(shape, info.smallest_normal * info.eps, dtype=dtype)
    x[..., ::3] *= -7
    return x


VALUES: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    "zero": lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    "constant": lambda shape, dtype: torch.full(shape, 0.0371, dtype=dtype),
    "negative constant": lambda shape, dtype: torch.full(shape, -31.7, dtype=dtype),
    "far from zero": lambda shape, dtype: (1000 + torch.rand(shape)).to(dtype),
    "half zero": lambda shape, dtype: torch.randn(shape).relu().to(dtype),
    "mixed": mixed,
    "outlier": outlier,
    "largest": largest,
    "one sign, largest": lambda shape, dtype: largest(shape, dtype).abs(),
    "subnormal": subnormal,
}


def leaves(parts: Parts) -> list[Tensor]:
    return [t for p in parts if p is not None for t in (leaves(p) if isinstance(p, Parts) else [p])]


def bits(parts: Parts) -> list[bytes]:
    return [t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in leaves(parts)]


# -- the numbers -------------------------------------------------------------------------------------------------------


@SPEC
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_finite(spec: QuantSpec, dtype: torch.dtype) -> None:
    for name, make in VALUES.items():
        x = make((3, 40), dtype)
        assert x.isfinite().all(), name
        parts = quantize(x, spec)
        assert all(t.float().isfinite().all() for t in leaves(parts)), name
        for out in (dtype, torch.float32, torch.bfloat16, torch.float16):
            y = dequantize(parts, spec, x.shape, out)
            assert y.isfinite().all(), (name, out)
            if name == "zero":  # an offset may be rounded by as much as its own dtype's least number
                assert y.abs().max() <= (_nearest_zero(spec, dtype) if spec.offset is None else 2.0**-24)


def _nearest_zero(spec: QuantSpec, dtype: torch.dtype) -> float:
    """The least number under the least scale: zero, but for tables that do not hold it."""
    values = spec.format.values if spec.format.kind == "table" else (0.0,)
    info = torch.finfo(dtype)
    return min(abs(v) for v in values) * max(
        info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal
    )


@SPEC
@pytest.mark.parametrize("value", [v for v in VALUES if v not in ("largest", "one sign, largest")])
def test_codes_are_the_nearest_under_the_stored_parts(spec: QuantSpec, value: str) -> None:
    """|x - x'| <= half the gap between the neighbouring numbers, times scale; and only the ends clip."""
    x = VALUES[value]((3, 40), torch.float32)
    parts = quantize(x, spec)
    count = blocks.counts(spec.block, x.shape)
    scale = part_value(parts.scale, spec.scale, count, torch.float64)
    offset = 0.0 if parts.offset is None else part_value(parts.offset, spec.offset, count, torch.float64)
    zero = spec.mid + (0 if parts.zero_point is None else parts.zero_point.double())
    bottom, top = spec.format.lo - zero, spec.format.hi - zero
    low, high = (torch.minimum(bottom * scale, top * scale), torch.maximum(bottom * scale, top * scale))
    x64, y64 = (blocks.split(blocks.pad(t, spec.block), count) for t in (x.double(), _value64(parts, spec, x.shape)))
    inside = torch.minimum(torch.maximum(x64, blocks.expand(low + offset)), blocks.expand(high + offset))
    gap = _largest_gap(spec) * scale.abs()
    # encode computes with the stored parts in their dtype: relative to the number of steps, and to the offset
    noise = _unit(spec) * blocks.expand(torch.maximum(low.abs(), high.abs()) + torch.as_tensor(offset).abs())
    assert ((y64 - inside).abs() <= blocks.expand(gap) / 2 + noise).all()
    clipped = ((x64 - inside).abs() - noise).amax(blocks.inner_axes(x.ndim))
    reach = max(spec.format.hi, -spec.format.lo)
    steps = reach * _scale_step(parts, spec) + _offset_step(parts, spec)
    assert (clipped <= _may_clip(spec) * scale.abs() + _cannot_hold(spec, x) + steps).all()


def _unit(spec: QuantSpec) -> float:
    """Precision of the arithmetic: that of the stored parts, because torchao's is."""
    kinds = (spec.scale, spec.offset)
    plain = [d for d in kinds if isinstance(d, torch.dtype)]
    nested = [_unit(d) for d in kinds if isinstance(d, QuantSpec)]
    return max([torch.finfo(torch.float32).eps, *(torch.finfo(d).eps for d in plain), *nested])


def _value64(parts: Parts, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    return dequantize(parts, spec, shape, torch.float64)


def _largest_gap(spec: QuantSpec) -> float:
    codes = torch.arange(1 << spec.format.bits, dtype=torch.uint8)
    if spec.format.kind == "int":
        return 1.0
    values = spec.format.decode(spec.format.from_unsigned(codes[: len(spec.format.values) or 256]), torch.float64)
    return float(values[values.isfinite()].unique().diff().max())


def _may_clip(spec: QuantSpec) -> float:
    """By how many scales the largest element of a block may lie outside the codes."""
    if spec.offset is not None or spec.zero_point:
        return 0.5
    if spec.format.kind == "int":
        return 1.0 if spec.format.bits == 1 else 0.5  # symmetric: the positive end may clip by half a step
    if isinstance(spec.scale, QuantSpec):
        # MX's floor clips what lies between the largest number and the next power of two; a scale rounded to 4
        # significant bits, or to 8, makes the codes reach less far
        return 2.0 ** math.ceil(math.log2(spec.format.hi)) - spec.format.hi if spec.format.hi > 1 else 2.0**-7
    return abs(spec.format.hi + spec.format.lo)  # a table may be longer on one side


def _scale_step(parts: Parts, spec: QuantSpec) -> float:
    """Distance between the least scales that can be stored: where scales are smaller, blocks clip or are zero."""
    if isinstance(spec.scale, QuantSpec):
        if spec.scale.format.kind == "int" and spec.scale.offset is None:
            return max(float(parts.scale.scale.max()) / 2, 2.0**-24)  # scales are whole multiples of a float16
        return 2.0**-9 * float(parts.scale.scale.max()) if spec.scale.format is E4M3 else 0.0
    return 2.0**-24 if torch.float16 in (spec.scale, spec.offset) else 0.0


def _offset_step(parts: Parts, spec: QuantSpec) -> float:
    """By how much an offset may be rounded that is stored in codes."""
    return max(float(parts.offset.scale.abs().max()) / 2, 2.0**-24) if isinstance(spec.offset, QuantSpec) else 0.0


def _cannot_hold(spec: QuantSpec, x: Tensor) -> Tensor:
    """What lies on a side of zero that the format does not have."""
    if spec.zero_point or spec.offset is not None:
        return torch.zeros(())
    if spec.format.lo - spec.mid >= 0:
        return x.clamp(max=0).abs().max()
    return x.clamp(min=0).max() if spec.format.hi - spec.mid <= 0 else torch.zeros(())


# Quantizing what was dequantized changes nothing where the largest element of a block is itself a number of the format
# under its scale: the scale is a power of two, or the element over the scale is 1. Elsewhere the scale may move by a
# unit, because (hi * scale) / hi is rounded twice, or by half a step, because the element was clipped.
IDEMPOTENT = ("mxfp8", "mxfp6", "mxfp4", "nf4_block", "ternary_tensor", "nf4", "ternary", "udynamic8", "udynamic4")


@pytest.mark.parametrize("name", IDEMPOTENT)
@pytest.mark.parametrize("value", VALUES)
def test_quantizing_twice_changes_nothing(name: str, value: str) -> None:
    spec, x = ENROLLED[name], VALUES[value]((3, 40), torch.float32)
    if value in ("subnormal", "zero"):
        x = x * 2.0**40  # a scale below float32's normal numbers is raised, so it is not a function of the block
    once = quantize(x, spec)
    assert bits(quantize(dequantize(once, spec, x.shape), spec)) == bits(once)


@SPEC
def test_the_codes_of_the_values_are_the_codes(spec: QuantSpec) -> None:
    """Idempotence that every spec has: under the same parameters."""
    x = mixed((5, 48), torch.float32)
    parts = quantize(x, spec)
    count = blocks.counts(spec.block, x.shape)
    scale, offset = (
        None if part is None else part_value(part, kind, count, torch.float32)
        for part, kind in ((parts.scale, spec.scale), (parts.offset, spec.offset))
    )
    plain = spec.with_(scale=torch.float32, offset=None if spec.offset is None else torch.float32)
    again = quantize(dequantize(parts, spec, x.shape), plain, params=Params(scale, parts.zero_point, offset))
    y, z = dequantize(parts, spec, x.shape), dequantize(again, plain, x.shape)
    if isinstance(spec.scale, QuantSpec) or spec.offset is not None:
        torch.testing.assert_close(z, y, rtol=2**-20, atol=2**-20)  # -0 and 0, or a sum that was rounded
    elif len({*spec.format.values}) < len(spec.format.values):  # two codes of one number
        assert torch.equal(z, y)
    else:
        assert torch.equal(again.codes.view(torch.uint8), parts.codes.view(torch.uint8))


# -- shapes, strides, threads ------------------------------------------------------------------------------------------


@SPEC
@pytest.mark.parametrize("shape", [(13,), (7, 31), (3, 5, 37), (2, 3, 5, 17), (2, 2, 3, 2, 19)])
def test_any_rank_and_odd_sizes(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    if spec.block is not None and len(spec.block) > len(shape):
        with pytest.raises(ValueError, match=f"has {len(spec.block)} axes"):
            quantize(torch.randn(shape), spec)
        return
    x = torch.randn(shape)
    parts = quantize(x, spec)
    assert tuple(parts.codes.shape) == blocks.padded(spec.block, shape)
    # padding is invisible: the last, incomplete block is quantized as if it stood alone
    if spec.block is not None and len(spec.block) == 1 and spec.block[0] > 0 and not isinstance(spec.scale, QuantSpec):
        start = shape[-1] // spec.block[0] * spec.block[0]
        if start < shape[-1]:
            tail = x[..., start:].contiguous()
            alone = dequantize(quantize(tail, spec), spec, tail.shape)
            assert torch.equal(dequantize(parts, spec, shape)[..., start:], alone)


@SPEC
def test_strides_do_not_matter(spec: QuantSpec) -> None:
    base = torch.randn(40, 6, 34)
    for view in (base.permute(2, 1, 0), base[::2, :, 1::3], base.flip(0)[:, 0], base[:1].expand(3, 6, 34)):
        parts = quantize(view, spec)
        assert bits(parts) == bits(quantize(view.contiguous(), spec))
        assert all(t.is_contiguous() for t in leaves(parts))
        out = dequantize(parts, spec, view.shape)
        assert out.is_contiguous()
        assert out.shape == view.shape


@SPEC
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 33])
def test_rows_do_not_know_of_each_other(spec: QuantSpec, rows: int) -> None:
    x = torch.randn(rows, 40)
    y = dequantize(quantize(x, spec), spec, x.shape)
    assert y.shape == x.shape
    shared = (
        spec.block is None or len(spec.block) > 1 or (isinstance(spec.scale, QuantSpec) and spec.scale.block is None)
    )
    if shared:
        assert y.isfinite().all()
        return
    for i in range(rows):
        assert torch.equal(y[i], dequantize(quantize(x[i], spec), spec, x[i].shape))


@SPEC
@pytest.mark.parametrize("shape", [(), (0,), (0, 40), (40, 0), (2, 0, 3)])
def test_empty_and_single(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    if spec.block is not None and len(spec.block) > len(shape):
        return  # refused: see test_any_rank_and_odd_sizes
    x = torch.full(shape, 0.75)
    y = dequantize(quantize(x, spec), spec, shape)
    assert y.shape == x.shape
    signed = spec.format.hi - spec.mid > 0
    assert ((y - x).abs() <= (0.25 if signed else 0.75)).all()


@SPEC
def test_the_number_of_threads_does_not_matter(spec: QuantSpec) -> None:
    x = torch.randn(130, 1030)  # above what torch splits among threads
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            parts = quantize(x, spec)
            y = dequantize(parts, spec, x.shape, torch.bfloat16)
            found.append([*bits(parts), y.view(torch.int16).numpy().tobytes()])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


# -- data --------------------------------------------------------------------------------------------------------------


@SPEC
def test_json_and_pickle_give_the_same_spec(spec: QuantSpec) -> None:
    for layout in ("plain", "bits"):
        laid = spec.with_(layout=layout)
        for copy in (QuantSpec.from_json(laid.to_json()), pickle.loads(pickle.dumps(laid))):
            assert copy == laid
            assert hash(copy) == hash(laid)
            assert str(copy) == str(laid)
    above = spec.scale
    fixed = not isinstance(above, QuantSpec) or (above.scale is not None and above.block is None is above.offset)
    for act in (ActivationSpec(spec), *([ActivationSpec(spec, "static", "mse", 1e-6)] if fixed else [])):
        assert ActivationSpec.from_dict(json.loads(json.dumps(act.to_dict()))) == act


def test_different_specs_read_differently() -> None:
    enrolled = ENROLLED | {"no mid": SPECS["tinygemm"].with_(mid=0), "bits": SPECS["tinygemm"].with_(layout="bits")}
    for (one, a), (other, b) in itertools.combinations(enrolled.items(), 2):
        assert (a == b) == (str(a) == str(b)) == (a.to_json() == b.to_json()), (one, other)


def changed(**changes: object) -> str:
    data = {"version": 1, **SPECS["nf4_double"].to_dict(), **changes}
    return json.dumps({key: value for key, value in data.items() if value != "absent"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed(version=3), "version 3; this release reads 1 to 2"),
        (changed(version=True), "version True"),
        (changed(version="absent"), "version None"),
        (changed(format="absent"), r"missing \['format'\]"),
        (changed(colour="red"), r"unknown \['colour'\]"),
        (changed(format="nf5"), "unknown number format 'nf5'"),
        (changed(format=4), "format must be str, got 4"),
        (changed(block=[0]), "each entry is a positive size"),
        (changed(block=[True]), "a list of integers"),
        (changed(block="64"), "a list of integers"),
        (changed(scale="float"), "unknown dtype 'float'"),
        (changed(scale=3), "QuantSpec must be an object, got int"),
        (changed(zero_point=1), "zero_point must be bool"),
        (changed(zero_point=True), "needs an integer format, got nf4"),
        (changed(zero_point="uint9"), "unknown number format 'uint9'"),
        (changed(format="uint4", zero_point="uint4"), "declares version 1, but its fields need version 2"),
        (
            changed(version=2, format="uint4", zero_point="uint3"),
            "uint3 does not cover all codes of uint4; use uint4, a wider",
        ),
        (changed(version=2, format="uint4", zero_point="int4"), "int4 does not cover all codes of uint4"),
        (changed(version=2, format="uint4", zero_point="nf4"), "nf4 does not cover all codes of uint4"),
        (changed(version=2, zero_point="uint4"), "needs an integer format, got nf4"),
        (changed(mid=8), "mid must be one of the codes"),
        (changed(scale=None, offset="float32"), "cannot have zero_point or offset"),
        ("[]", "version None"),
    ],
)
def test_bad_json_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantSpec.from_json(text)


def test_zero_points_are_said_in_one_way() -> None:
    packed = QuantSpec(UINT4, (128,), zero_point=UINT4)
    assert packed != QuantSpec(UINT4, (128,), zero_point=True)
    assert (packed.version, packed.with_(zero_point=True).version) == (2, 1)
    assert QuantSpec(INT4, (32,), scale=packed).version == 2
    assert str(packed) == "uint4[128] scale=f32 zero_point=uint4"
    assert QuantSpec(UINT8, (128,), zero_point=UINT8) == QuantSpec(UINT8, (128,), zero_point=True)
    assert ActivationSpec(packed).spec == packed.with_(zero_point=True)  # there is but one number
    for n in (128, 129, 1000, 4096):
        groups = -(-n // 128)
        assert packed.with_(layout="bits").nbytes((3, n)) == 3 * (-(-groups * 128 // 2) + 4 * groups + -(-groups // 2))
        assert packed.nbytes((3, n)) == 3 * groups * (128 + 4 + 1)
    assert SPECS["uint4_zeros"].with_(layout="bits").nbytes((4096, 4096)) * 8 / 4096**2 == 4 + 20 / 128


def test_a_wrong_spec_cannot_be_built() -> None:
    uint4 = SPECS["tinygemm"]
    with pytest.raises(ValueError, match="either zero_point, or offset and mid"):
        uint4.with_(zero_point=True)
    with pytest.raises(ValueError, match="mid must be one of the codes of an integer format, got 16 for uint4"):
        uint4.with_(mid=16)
    with pytest.raises(
        ValueError, match=r"scale must be a float dtype such as torch\.float16, or a QuantSpec, got torch.int8"
    ):
        uint4.with_(scale=torch.int8)
    with pytest.raises(ValueError, match="zero points must be in the range of the codes"):
        ActivationSpec(QuantSpec(UINT4, (-1,), zero_point=UINT5))
    with pytest.raises(ValueError, match="mode must be one of dynamic, static, got 'sometimes'"):
        ActivationSpec(uint4, "sometimes")


@SPEC
def test_another_writer_refuses_it_or_writes_its_value(spec: QuantSpec) -> None:
    """safetensors reads numel * itemsize bytes from ``data_ptr()``."""
    w = QT.from_float(torch.randn(16, 64), spec)
    for refused in (w, w.to(torch.bfloat16), w[:8], nn.Parameter(w, False), w.t().contiguous(), w.clone(), w.t()):
        if not isinstance(refused, QT):  # torchao's NF4 becomes plain by .to(dtype)
            assert spec.format.name.startswith("nf4_digits")
            back = safetensors.torch.load(safetensors.torch.save({"w": refused}))["w"]
            assert torch.equal(back, w.dequantize(refused.dtype))
            continue
        reason = REFUSAL if refused.is_contiguous() else "non contiguous tensor"
        with pytest.raises((RuntimeError, ArgumentError, ValueError), match=re.escape(reason)):
            safetensors.torch.save({"w": refused})
    for exact, held in ((w.dequantize(), w.dequantize()), (w.codes, w.codes), (w[:0], torch.empty(0, 64))):
        back = safetensors.torch.load(safetensors.torch.save({"w": exact}))["w"]
        assert back.dtype == held.dtype
        assert back.shape == held.shape
        assert torch.equal(back.contiguous().view(torch.uint8), held.contiguous().view(torch.uint8))
