"""The same codes under another spec: never another number but for the rounding of scales and offsets."""

import itertools

import pytest
import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.convert_spec import conversion_kind, convert_parts
from pennyweight.core.formats import E2M1, INT3, INT4, INT8, NF4, TERNARY, UINT3, UINT4, UINT8
from pennyweight.core.numerics import Parts, dequantize, quantize, sqnr
from pennyweight.core.spec import MXFP4, NVFP4, SPECS, TINYGEMM, QuantSpec

F16, BF16 = torch.float16, torch.bfloat16
SHAPE = (6, 256)
EXTRA = {
    "int4 f16": QuantSpec(INT4, (32,), scale=F16),
    "q4_0": QuantSpec(UINT4, (32,), scale=F16, mid=8),
    "q4_1": QuantSpec(UINT4, (32,), scale=F16, offset=F16),
    "int4 zero": QuantSpec(INT4, (32,), scale=F16, zero_point=True),
    "uint4 zero": QuantSpec(UINT4, (32,), scale=F16, zero_point=True),
    "uint8 zero": QuantSpec(UINT8, (32,), zero_point=True),
    "int8 row": QuantSpec(INT8, (-1,)),
    "int8 groups": QuantSpec(INT8, (32,)),
    "uint3 zero row": QuantSpec(UINT3, (-1,), zero_point=True),
    "int3 tensor": QuantSpec(INT3, None),
    "int4 f64": QuantSpec(INT4, (32,), scale=torch.float64),
}


def made(spec: QuantSpec) -> tuple[Parts, Tensor]:
    parts = quantize(torch.randn(SHAPE), spec)
    return parts, dequantize(parts, spec, SHAPE, torch.float64)


@pytest.mark.parametrize("spec", [*SPECS.values(), *EXTRA.values()], ids=str)
def test_what_is_respelt_is_the_same_but_for_rounded_scales(spec: QuantSpec) -> None:
    parts, value = made(spec)
    assert convert_parts(parts, spec, SHAPE, spec) is not None, "a spec can be said in its own words"
    for to in (*SPECS.values(), *EXTRA.values()):
        new, told = convert_parts(parts, spec, SHAPE, to), conversion_kind(spec, SHAPE, to)
        assert (new is None) == (told is None)
        if new is None:
            continue
        if told == "exact":
            assert torch.equal(dequantize(new, to, SHAPE), dequantize(parts, spec, SHAPE)), to
        assert new.codes.dtype == to.format.code_dtype
        assert {s for s in ("scale", "zero_point", "offset") if getattr(new, s) is not None} == to.part_specs().keys()
        for slot, kind in to.part_specs().items():
            part = getattr(new, slot)
            if not isinstance(kind, QuantSpec):
                assert (part.dtype, tuple(part.shape)) == (kind, blocks.counts(to.block, SHAPE)), (to, slot)
        again = dequantize(new, to, SHAPE, torch.float64)
        if to.scale is torch.float32 and to.offset is None:
            assert torch.equal(dequantize(new, to, SHAPE), dequantize(parts, spec, SHAPE)), to
        else:
            assert sqnr(value, again) > 40, to


def test_known_pairs_in_both_directions() -> None:
    same = [("int4 f16", "q4_0"), ("uint4 zero", "int4 zero")]
    for a, b in [*same, *((b, a) for a, b in same)]:
        parts, value = made(EXTRA[a])
        new = convert_parts(parts, EXTRA[a], SHAPE, EXTRA[b])
        assert new is not None, (a, b)
        assert torch.equal(dequantize(new, EXTRA[b], SHAPE, torch.float64), value)
        back = convert_parts(new, EXTRA[b], SHAPE, EXTRA[a])
        assert back is not None
        for mine, theirs in zip(back, parts, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("spec", "to"),
    [
        (EXTRA["int4 f16"], EXTRA["int4 zero"]),
        (EXTRA["q4_0"], EXTRA["q4_1"]),
        (EXTRA["q4_0"], EXTRA["int8 groups"]),
        (EXTRA["uint3 zero row"], EXTRA["uint8 zero"]),
        (EXTRA["int8 row"], EXTRA["int8 groups"]),
        (EXTRA["int3 tensor"], EXTRA["int4 f16"]),
        (MXFP4, QuantSpec(E2M1, (16,))),
        (NVFP4, QuantSpec(E2M1, (16,))),
        (TINYGEMM, EXTRA["q4_1"]),
        (EXTRA["uint4 zero"], EXTRA["q4_1"]),
        (EXTRA["int4 zero"], TINYGEMM.with_(block=(32,), scale=torch.float32, offset=torch.float32)),
        (QuantSpec(TERNARY, None), EXTRA["int8 row"]),
    ],
    ids=str,
)
def test_can_be_said(spec: QuantSpec, to: QuantSpec) -> None:
    parts, value = made(spec)
    new = convert_parts(parts, spec, SHAPE, to)
    assert new is not None
    assert sqnr(value, dequantize(new, to, SHAPE, torch.float64)) > 45


@pytest.mark.parametrize(
    ("spec", "to", "why"),
    [
        (EXTRA["uint4 zero"], EXTRA["q4_0"], "zero points of its own"),
        (EXTRA["q4_1"], EXTRA["uint4 zero"], "a real offset"),
        (EXTRA["int8 row"], EXTRA["int4 f16"], "more codes"),
        (EXTRA["int8 groups"], EXTRA["int8 row"], "more scales"),
        (QuantSpec(NF4, (64,)), EXTRA["q4_0"], "a table"),
        (QuantSpec(INT4, (48,)), QuantSpec(INT4, (32,)), "blocks that do not divide"),
        (EXTRA["int4 f16"], SPECS["nf4_double"], "a quantized scale"),
        (QuantSpec(INT4, (32, 32, 2)), EXTRA["int4 f16"], "more axes"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_cannot_be_said(spec: QuantSpec, to: QuantSpec, why: str) -> None:
    if why == "more axes":
        parts = quantize(torch.randn(SHAPE), QuantSpec(INT4, (32,)))
        assert convert_parts(parts, spec, SHAPE, to) is None
        return
    assert convert_parts(made(spec)[0], spec, SHAPE, to) is None, why


def test_padded_rows_keep_their_blocks() -> None:
    x = torch.randn(3, 50)
    a, b = QuantSpec(INT4, (32,), scale=F16), QuantSpec(UINT4, (32,), scale=F16, mid=8)
    parts = quantize(x, a)
    new = convert_parts(parts, a, x.shape, b)
    assert new is not None
    assert torch.equal(dequantize(new, b, x.shape), dequantize(parts, a, x.shape))
    assert convert_parts(parts, a, x.shape, QuantSpec(INT4, (16,))) is None  # 50 is no whole number of either block


def test_every_pair_terminates_with_parts_or_none() -> None:
    """Odd shapes: no pair of specs may raise."""
    for shape in ((3, 50), (1, 1), (2, 3, 64)):
        x = torch.randn(shape)
        for a, b in itertools.product((*SPECS.values(), *EXTRA.values()), repeat=2):
            if a.block is not None and len(a.block) > len(shape):
                continue
            convert_parts(quantize(x, a), a, shape, b)
