"""Every rule for choosing parameters, by being registered."""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.formats import E2M1, E4M3, E5M2, E8M0, INT1, INT4, INT8, UINT4, UINT8
from pennyweight.core.numerics import dequantize, quantize, store_qparams
from pennyweight.core.qparams import RULES, Params, choose, default_rule
from pennyweight.core.spec import MXFP4, MXFP8, NF4_DOUBLE, NVFP4, SPECS, TINYGEMM, QuantSpec

RULE = pytest.mark.parametrize("rule", RULES)
ROWS = 6


@functools.cache
def accepted(rule: str) -> list[QuantSpec]:
    """The named specs that store what the rule chooses."""
    specs = []
    for spec in SPECS.values():
        with contextlib.suppress(ValueError):
            choose(torch.ones(2, 32), spec, rule)
            specs.append(spec)
    return specs


def rows() -> Tensor:
    """[6, 256]: zero, constant, positive, mixed, one outlier, small."""
    x = torch.randn(ROWS, 256)
    x[0] = 0.0
    x[1] = -0.75
    x[2] = x[2].abs() + 0.5
    x[4, 9] = 40.0
    x[5] *= 1e-3
    return x


def padded(x: Tensor, spec: QuantSpec) -> Tensor:
    return blocks.pad(x, spec.block)


@RULE
def test_some_spec_takes_it(rule: str) -> None:
    assert accepted(rule), f"no spec in pennyweight.core.spec takes rule {rule!r}: name one that does"


@RULE
def test_parts_are_those_of_the_spec_positive_and_finite(rule: str) -> None:
    for spec in accepted(rule):
        for x in (rows(), rows().half(), rows()[:0]):
            p = choose(padded(x, spec), spec, rule)
            assert p.scale is not None
            assert (p.scale > 0).all(), spec
            given = {"scale": p.scale, "zero_point": p.zero_point, "offset": p.offset}
            assert {name for name, part in given.items() if part is not None} == spec.part_specs().keys()
            for part in given.values():
                assert part is None or tuple(part.shape) == blocks.counts(spec.block, x.shape)
                assert part is None or part.isfinite().all()


@RULE
def test_scaling_by_a_power_of_two_scales_the_parameters(rule: str) -> None:
    for spec in accepted(rule):
        # the scale of a block without range is the floor, which does not scale; nor do float16's subnormal numbers
        x = padded(rows()[2:] * 64, spec)
        p, q = choose(x, spec, rule), choose(x * 8, spec, rule)
        assert torch.equal(q.scale, p.scale * 8), spec
        if p.zero_point is not None and q.zero_point is not None:
            assert torch.equal(p.zero_point, q.zero_point)
        if p.offset is not None and q.offset is not None:
            assert torch.equal(p.offset * 8, q.offset)


@RULE
def test_the_order_within_a_block_does_not_matter(rule: str) -> None:
    for spec in accepted(rule):
        x = padded(rows(), spec)
        if spec.block != (-1,):
            continue
        p, q = choose(x, spec, rule), choose(x.flip(-1), spec, rule)
        for a, b in zip(p, q, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                # a search sums errors, in another order
                torch.testing.assert_close(a, b, rtol=0.02 if rule == "mse" else 0, atol=0)


@RULE
def test_the_floor_of_the_scale(rule: str) -> None:
    for spec in accepted(rule):
        if isinstance(spec.scale, QuantSpec) or rule.startswith("mx_"):
            continue  # those have the least power of two of e8m0 for a floor, or the floor of the scale's own scale
        p = choose(torch.zeros(2, 256), spec, rule, eps=0.125)
        assert (p.scale == 0.125).all()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_mse_is_never_worse_than_the_default(spec: QuantSpec) -> None:
    for x in (rows(), rows().bfloat16(), torch.randn(3, 130) ** 3, torch.rand(2, 64) + 3, torch.full((1, 64), 3e38)):
        if spec.block is not None and len(spec.block) > x.ndim:
            continue
        errors = {}
        for rule in ("mse", default_rule(spec)):
            y = dequantize(quantize(x, spec, rule), spec, x.shape)
            padded_error = blocks.pad((y.double() - x.double()).square(), spec.block)
            errors[rule] = blocks.split(padded_error, blocks.counts(spec.block, x.shape)).sum(blocks.inner_axes(x.ndim))
        mse, plain = errors["mse"], errors[default_rule(spec)]
        if isinstance(spec.scale, QuantSpec) and spec.scale.scale is not None:
            mse, plain = mse.sum(), plain.sum()  # blocks share the parameters of their scales
        assert (mse <= plain * (1 + 1e-5)).all()


def test_mse_finds_the_better_range() -> None:
    """One outlier among small numbers on three levels: a smaller range loses less."""
    x = torch.cat([torch.full((1, 127), 0.45), torch.ones(1, 1)], -1)
    spec = SPECS["ternary_tensor"]
    default, searched = choose(x, spec), choose(x, spec, "mse")
    assert default.scale.item() == 1.0
    assert 0.5 <= searched.scale.item() < 0.9


# -- values computed by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "absmax", "floor", "ceil", "even", "rceil"),
    [
        # e4m3: largest 448 = 1.75 * 2**8, so the exponent of the element is 8; 3 mantissa bits
        (E4M3, 448.0, 0, 1, 0, 0),
        (E4M3, 256.0, 0, 0, 0, 0),  # a power of two: ceil adds nothing
        (E4M3, 449.0, 0, 1, 0, 1),  # the least above the largest number
        (E4M3, 495.0, 0, 1, 0, 1),  # rounds to 1.875 * 2**8
        (E4M3, 496.0, 0, 1, 1, 1),  # halfway between 1.875 and 2: up
        (E4M3, 1.0, -8, -8, -8, -8),
        (E4M3, 2.0**-130, -127, -127, -127, -127),  # the least that e8m0 has
        (E4M3, 0.0, -127, -127, -127, -127),
        (E4M3, 3.0e38, 119, 120, 119, 120),  # 1.763 * 2**127
        # e5m2: 57344 = 1.75 * 2**15; 2 mantissa bits
        (E5M2, 57344.0, 0, 1, 0, 0),
        (E5M2, 61440.0, 0, 1, 1, 1),  # 1.875 * 2**15: halfway, up
        # e2m1: 6 = 1.5 * 2**2; 1 mantissa bit
        (E2M1, 6.0, 0, 1, 0, 0),
        (E2M1, 6.99, 0, 1, 0, 1),
        (E2M1, 7.0, 0, 1, 1, 1),
        (E2M1, 3.0, -1, 0, -1, -1),
        (E2M1, 4.0, 0, 0, 0, 0),
        # int8: 127 = 1.98 * 2**6, the MXINT8 of OCP in units of its last place
        (INT8, 127.0, 0, 1, 1, 0),
        (INT8, 64.0, 0, 0, 0, 0),
    ],
)
def test_mx_exponents(fmt: object, absmax: float, floor: int, ceil: int, even: int, rceil: int) -> None:
    spec = MXFP8.with_(format=fmt)
    x = torch.zeros(1, 32)
    x[0, 3] = -absmax
    for rule, exponent in (("mx_floor", floor), ("mx_ceil", ceil), ("mx_even", even), ("mx_rceil", rceil)):
        p = choose(x, spec, rule)
        assert p.scale.double().log2().item() == exponent, rule
        (scale, _, _), seen = store_qparams(p, spec)
        assert scale.codes.item() == exponent + 127
        assert torch.equal(seen.scale, p.scale)


@pytest.mark.parametrize("spec", [MXFP8, MXFP4], ids=str)
@pytest.mark.parametrize("rule", ["mx_floor", "mx_ceil", "mx_even", "mx_rceil"])
def test_mx_scales_of_the_greatest_floats(spec: QuantSpec, rule: str) -> None:
    """Rounding them to the width of the element exceeds float32; the scale must not become tiny."""
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    value = dequantize(quantize(x, spec, rule), spec, x.shape)
    assert (value >= x / 2).all()
    assert value.isfinite().all()


def test_mx_vector() -> None:
    """OCP MX v1.0 section 6.3 by hand, e2m1: absmax 5.1, scale 2**(2 - 2) = 1."""
    x = torch.tensor([5.1, -5.0, 0.25, 0.26, 0.75, -1.25, 1.75, 2.5, 3.5, -0.2, 0.0, 4.9])
    want = torch.tensor([6.0, -4.0, 0.0, 0.5, 1.0, -1.0, 2.0, 2.0, 4.0, -0.0, 0.0, 4.0])  # ties to the even code
    parts = quantize(x, MXFP4)
    assert parts.scale.codes.tolist() == [127]
    assert torch.equal(dequantize(parts, MXFP4, x.shape), want)
    half = dequantize(quantize(x / 1024, MXFP4), MXFP4, x.shape)
    assert torch.equal(half, want / 1024)


@pytest.mark.parametrize(
    ("rule", "spec", "scale", "zero_point", "offset"),
    [
        ("symmetric", QuantSpec(INT8), 10.2 / 127.5, None, None),
        ("symmetric", QuantSpec(INT4), 10.2 / 7.5, None, None),
        ("symmetric", QuantSpec(INT1), 10.2 / 0.5, None, None),
        ("symmetric", QuantSpec(UINT8, mid=128), 10.2 / 127.5, None, None),
        ("symmetric", QuantSpec(UINT8), 10.2 / 255, None, None),  # no negative numbers: the range is 0 to max
        ("symmetric", QuantSpec(E4M3), 10.2 / 448, None, None),
        ("symmetric_no_clip", QuantSpec(INT4), 10.2 / 7, None, None),
        ("symmetric_no_clip", QuantSpec(UINT4, mid=8), 10.2 / 7, None, None),
        ("symmetric_no_clip", QuantSpec(INT1), 3.5, None, None),  # int1 is {-1, 0}
        ("asymmetric", QuantSpec(INT8, zero_point=True), 13.7 / 255, -63.0, None),
        ("asymmetric", QuantSpec(UINT4, zero_point=True), 13.7 / 15, 4.0, None),
        ("symmetric", QuantSpec(INT8, zero_point=True), 10.2 / 127.5, 0.0, None),
        ("minmax", QuantSpec(UINT4, offset=torch.float32, mid=8), 13.7 / 15, None, -3.5 + 13.7 / 15 * 8),
        ("minmax", QuantSpec(INT4, offset=torch.float32), 13.7 / 15, None, -3.5 + 13.7 / 15 * 8),
        ("minmax", QuantSpec(UINT4, offset=torch.float32), 13.7 / 15, None, -3.5),
    ],
    ids=str,
)
def test_affine_rules(rule: str, spec: QuantSpec, scale: float, zero_point: float | None, offset: float | None) -> None:
    p = choose(torch.tensor([-3.5, 0.0, 1.0, 10.2]), spec, rule)
    for got, want in zip(p, (scale, zero_point, offset, None), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.item() == pytest.approx(want, rel=1e-6)


def test_minmax_with_an_offset_that_overflows_in_between() -> None:
    """float16: min + scale * 8 passes 65504 on the way, though the offset itself is small."""
    x = torch.tensor([-65504.0, 65504.0, 0.0, 30000.0], dtype=torch.float16)
    p = choose(x, TINYGEMM.with_(block=(-1,)), "minmax")
    assert p.scale.item() == pytest.approx(2 * 65504 / 15, rel=1e-3)
    assert p.offset.item() == pytest.approx(-65504 + 8 * 2 * 65504 / 15, rel=5e-3)
    spec = QuantSpec(UINT4, (-1,), torch.float16, offset=torch.float16, mid=8)
    y = dequantize(quantize(x, spec), spec, x.shape)
    assert (y - x.float()).abs().max() <= p.scale.item() / 2 * 1.01


def test_the_default_rule_follows_the_parts() -> None:
    want = {MXFP8: "mx_floor", NVFP4: "symmetric", NF4_DOUBLE: "symmetric", TINYGEMM: "minmax"}
    assert {spec: default_rule(spec) for spec in want} == want
    assert default_rule(QuantSpec(INT8, zero_point=True)) == "asymmetric"
    assert choose(torch.ones(1), QuantSpec(E8M0, scale=None)) == Params()


def test_a_wrong_choice_is_refused() -> None:
    x, spec = torch.ones(2, 4), QuantSpec(INT8, (-1,))
    with pytest.raises(ValueError, match=r"unknown rule 'best' .* known: absmax, absmean, asymmetric, .*symmetric"):
        choose(x, spec, "best")
    with pytest.raises(ValueError, match=r"chooses a zero point, which .* give it zero_point=True"):
        choose(x, spec, "asymmetric")
    with pytest.raises(ValueError, match=r"chooses an offset, which .* give it an offset dtype"):
        choose(x, spec, "minmax")
    for eps in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be positive"):
            choose(x, spec, eps=eps)


def test_half_precision_scales_are_chosen_in_float32_where_they_are_quantized_again() -> None:
    x = (torch.rand(4, 64) * 100).bfloat16()
    for spec, dtype in itertools.product((NVFP4, NF4_DOUBLE), (torch.bfloat16, torch.float32)):
        got = choose(x.to(dtype), spec).scale
        assert got.dtype == torch.float32
        assert torch.equal(got, choose(x.float(), spec).scale)
