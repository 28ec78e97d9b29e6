"""Quantize and dequantize at the ends of the number line, with given parameters, and through autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pennyweight.core.formats import E2M1, E4M3, E8M0, INT1, INT4, INT8, NF4, UINT4, UINT8, get_format
from pennyweight.core.numerics import Params, Parts, dequantize, fake_quantize, quantize, sqnr
from pennyweight.core.qparams import choose
from pennyweight.core.spec import MXFP8, NF4_DOUBLE, NVFP4, SPECS, TINYGEMM, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT

F16, BF16 = torch.float16, torch.bfloat16
INT8_ROW = QuantSpec(INT8, (-1,))


def through(x: torch.Tensor, spec: QuantSpec, **options: object) -> torch.Tensor:
    return dequantize(quantize(x, spec, **options), spec, x.shape, x.dtype)  # type: ignore[arg-type]


# -- fake quantization -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_fake_quantize_is_deployment_with_the_gradient_passed_through(spec: QuantSpec, dtype: torch.dtype) -> None:
    x = torch.randn(3, 130).to(dtype).requires_grad_()
    y = fake_quantize(x, spec)
    assert y.dtype == dtype
    assert torch.equal(y, through(x.detach(), spec))
    weight = torch.randn(3, 130).to(dtype)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)  # also where x was clipped


def test_fake_quantize_takes_rule_and_eps() -> None:
    x = torch.randn(4, 32)
    spec = QuantSpec(INT4, (-1,))
    assert torch.equal(fake_quantize(x, spec, "mse"), through(x, spec, rule="mse"))
    assert not torch.equal(fake_quantize(x, spec, "mse"), fake_quantize(x, spec))
    assert torch.equal(fake_quantize(x * 0 + 0.01, spec, eps=0.02), torch.zeros_like(x))


# -- ranges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [TINYGEMM.with_(scale=F16, offset=F16, block=(-1,)), QuantSpec(UINT8, (-1,), F16, True)]
)
def test_float16_from_one_end_to_the_other(spec: QuantSpec) -> None:
    """max - min and x - min overflow float16; the result is still the nearest number, but for float16's rounding."""
    x = torch.linspace(-65504, 65504, 33).to(F16)
    y = through(x, spec)
    step = 2 * 65504 / (spec.format.hi - spec.format.lo)
    assert (y.float() - x.float()).abs().max() <= 0.6 * step


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("spec", [INT8_ROW, QuantSpec(INT4, (-1,)), QuantSpec(INT8, (-1,), zero_point=True)], ids=str)
def test_the_least_code_saturates_at_the_end_of_the_dtype(spec: QuantSpec, dtype: torch.dtype) -> None:
    """-128 * (max / 127.5) lies beyond the dtype."""
    top = torch.finfo(dtype).max
    y = through(torch.tensor([-top, top, 0.0, -top / 2], dtype=dtype), spec)
    assert y.isfinite().all()
    assert y[0] <= -0.93 * top
    assert y[1] >= 0.87 * top


def test_the_floor_of_a_float16_scale() -> None:
    """torchao's floor for integers is float16's least normal number; INT8 configs lower it by an explicit eps."""
    x = torch.full((1, 8), 1e-3, dtype=F16)
    assert quantize(x, INT8_ROW).scale.item() == torch.finfo(F16).smallest_normal
    fine = quantize(x, INT8_ROW, eps=torch.finfo(torch.float32).eps)
    assert fine.codes.tolist() == [[127] * 8]
    assert quantize(x * 0, INT8_ROW, eps=1e-12).scale.item() == 2.0**-24  # the least that float16 has


def test_float16_scales_below_their_reciprocals() -> None:
    """1 / scale overflows float16 below 2**-16, though the scale itself does not underflow."""
    x = torch.randn(4, 64) * 1e-4
    for dtype in (torch.float32, F16):
        spec = QuantSpec(INT8, (-1,), F16)
        parts = quantize(x.to(dtype), spec, eps=1e-12)
        assert parts.scale.max() < 2.0**-16
        step = parts.scale.float()
        error = (dequantize(parts, spec, x.shape) - x.to(dtype).float()).abs()
        assert (error <= step * (0.5 + 128 * 2.0**-10) + 127 * 2.0**-25).all()


def test_a_scale_that_underflows_sends_everything_to_zero() -> None:
    x = torch.tensor([[1e-9, -1e-9, 0.0]])
    for fmt in (INT8, E4M3, NF4):
        parts = quantize(x, QuantSpec(fmt, (-1,), F16))
        assert (parts.scale == 0).all()
        assert (dequantize(parts, QuantSpec(fmt, (-1,), F16), x.shape) == 0).all()
    spec = QuantSpec(UINT4, (-1,), F16, offset=F16, mid=8)
    assert (dequantize(quantize(x, spec), spec, x.shape) == 0).all()


def test_a_quantized_scale_may_be_zero() -> None:
    x = torch.cat([torch.full((1, 16), 1e4), torch.full((1, 16), 1e-4), torch.zeros(1, 16)], -1)
    parts = quantize(x, NVFP4)
    assert parts.scale.codes.float().tolist()[0][1:] == [0.0, 0.0]
    y = dequantize(parts, NVFP4, x.shape)
    assert (y[:, 16:] == 0).all()
    assert torch.allclose(y[:, :16], x[:, :16])


def test_a_scale_that_overflows_its_dtype_saturates() -> None:
    x = torch.tensor([[3e38, -3e38, 1.0]])
    for spec in (QuantSpec(INT8, (-1,), F16), TINYGEMM.with_(scale=F16, offset=F16)):
        parts = quantize(x, spec)
        assert parts.scale.item() == 65504
        assert dequantize(parts, spec, x.shape).isfinite().all()
    wide = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert dequantize(quantize(wide, INT8_ROW), INT8_ROW, wide.shape, torch.float64).isfinite().all()
    exact = QuantSpec(INT8, (-1,), torch.float64)
    assert torch.allclose(dequantize(quantize(wide, exact), exact, wide.shape, torch.float64), wide, rtol=0.01)


def test_float64_keeps_its_precision_and_its_small_numbers() -> None:
    spec = QuantSpec(INT8, (-1,), torch.float64)
    x = torch.randn(4, 32, dtype=torch.float64) * 1e-200
    y = dequantize(quantize(x, spec), spec, x.shape, torch.float64)
    assert sqnr(x, y) > 35
    tiny = dequantize(quantize(x, INT8_ROW), INT8_ROW, x.shape, torch.float64)
    assert (tiny == 0).all()  # float32 scales end at 2**-126


def test_formats_without_negative_numbers() -> None:
    x = torch.tensor([[-3.0, -0.1, 0.0, 1.0, 15.0]])
    unsigned = QuantSpec(UINT4, (-1,))
    assert through(x, unsigned).tolist() == [[0.0, 0.0, 0.0, 1.0, 15.0]]
    assert through(-x.abs(), unsigned).tolist() == [[0.0] * 5]
    centred = through(x, unsigned.with_(mid=8))
    assert torch.equal(centred, through(x, QuantSpec(INT4, (-1,))))


def test_one_bit() -> None:
    x = torch.tensor([[-2.0, -1.1, -0.9, 0.0, 2.0]])
    assert through(x, QuantSpec(INT1, (-1,)), rule="symmetric_no_clip").tolist() == [[-2.0, -2.0, 0.0, 0.0, 0.0]]
    assert through(torch.tensor([-3.0, 1.0]), QuantSpec(INT1, (-1,), zero_point=True)).tolist() == [-4.0, 0.0]
    two = QuantSpec(INT1, (-1,), offset=torch.float32)
    assert through(x, two).tolist() == [[-2.0, -2.0, -2.0, -2.0, 2.0]]  # 0 is halfway: the even code


def test_the_codes_of_scales_that_are_powers_of_two() -> None:
    x = torch.tensor([448.0, 1.0]).repeat_interleave(32)
    parts = quantize(x, MXFP8)
    assert parts.scale.codes.dtype == torch.uint8
    assert parts.scale.codes.tolist() == [127, 119]
    plain = QuantSpec(E8M0, scale=None)
    assert dequantize(quantize(torch.tensor([3.0, 0.7, 0.0]), plain), plain, (3,)).tolist() == [2.0, 0.5, 2.0**-127]


@given(
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from(sorted(set(SPECS) - {"fp8_block"})),
    st.sampled_from([torch.float32, BF16, F16, torch.float64]),
)
def test_any_finite_block_gives_finite_numbers_no_farther_than_its_range(
    values: list[float], name: str, dtype: torch.dtype
) -> None:
    x = torch.tensor(values, dtype=torch.float64).clamp(-65504, 65504).to(dtype)
    spec = SPECS[name]
    y = through(x, spec).double()
    assert y.isfinite().all()
    reach = x.double().abs().max()
    # half a step beyond, which is a seventh where codes have 3 bits, and a rounded scale
    assert (y.abs() <= reach * (1.17 if name == "q3_k" else 1.08) + 1e-3).all()


# -- given parameters --------------------------------------------------------------------------------------------------


def test_given_parameters_are_used_as_they_are() -> None:
    x = torch.tensor([[0.04, -0.06, 9.0], [0.1, 0.2, -9.0]])
    parts = quantize(x, INT8_ROW, params=Params(torch.tensor([[0.02], [0.1]])))
    assert parts.codes.tolist() == [[2, -3, 127], [1, 2, -90]]
    spec = QuantSpec(INT8, None, zero_point=True)
    parts = quantize(x, spec, params=Params(torch.full((1, 1), 0.1), torch.full((1, 1), -17)))
    assert parts.codes.tolist() == [[-17, -18, 73], [-16, -15, -107]]
    assert parts.zero_point.dtype == torch.int8


def test_given_parameters_of_other_parts_are_refused() -> None:
    one = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"stores \['scale'\]; the given parameters have other parts"):
        quantize(torch.ones(2, 4), INT8_ROW, params=Params(one, one))
    with pytest.raises(ValueError, match=r"stores \['scale', 'zero_point'\]"):
        quantize(torch.ones(2, 4), INT8_ROW.with_(zero_point=True), params=Params(one))


def test_codes_are_computed_from_the_scale_as_stored() -> None:
    """Rounding the scale to bfloat16 moves a code; computed from the unrounded scale it would be 127."""
    x = torch.tensor([[127.4, 1.0]])
    spec = QuantSpec(INT8, (-1,), BF16)
    params = Params(torch.tensor([[1.0035]]))
    assert quantize(x, spec, params=params).scale.item() == 1.0
    assert quantize(x, spec, params=params).codes.tolist() == [[127, 1]]
    nested = quantize(torch.randn(2, 256), NF4_DOUBLE)
    seen = dequantize(nested.scale, NF4_DOUBLE.scale, (2, 4))
    assert not torch.equal(seen, choose(torch.randn(2, 256), NF4_DOUBLE).scale)


def test_sqnr() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr(x, x) == float("inf")
    assert sqnr(x, x + torch.tensor([0.0, 0.05])) == pytest.approx(40.0)
    assert sqnr(x * 0, x) == float("-inf")


def test_e2m1_under_a_plain_scale() -> None:
    x = torch.tensor([[0.26, -0.74, 6.0, 5.0]])
    assert through(x, QuantSpec(E2M1, (-1,))).tolist() == [[0.5, -0.5, 6.0, 4.0]]


def test_under_a_float64_scale_the_product_is_rounded_once() -> None:
    third = torch.tensor([[1 / 3]], dtype=torch.float64)
    codes = torch.arange(-128, 128).to(torch.int8).reshape(1, -1)
    exact = codes.double() * third
    spec = QuantSpec(INT8, (-1,), torch.float64)
    assert torch.equal(dequantize(Parts(codes, third), spec, codes.shape), exact.float())
    rounded_twice = codes.float() * third.float()
    assert not torch.equal(rounded_twice, exact.float())
    inner = QuantSpec(E4M3, None, torch.float64)
    numbers = torch.linspace(0.1, 400, 256).to(torch.float8_e4m3fn).reshape(1, -1)
    nested = Parts(torch.ones_like(codes), Parts(numbers, third))
    got = dequantize(nested, QuantSpec(INT8, (1,), inner), codes.shape)
    assert torch.equal(got, (numbers.double() * third).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["plain", "bits"])
def test_formats_that_round_scales_step_by_step(dtype: torch.dtype, layout: str) -> None:
    """codes / factor + offset in the dtype of the format, rounded twice; the reference and the backend agree."""
    fmt = get_format(f"nf4_digits_{str(dtype).removeprefix('torch.')}")
    assert fmt.rounding is dtype
    spec = QuantSpec(fmt, (16,), scale=QuantSpec(get_format("int8"), (8,), offset=torch.float32), layout=layout)
    w = QT.from_float(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)).to(dtype), spec)
    scale = w.plain_parts().scale
    factor, offset = (1 / scale.scale).to(dtype), scale.offset.to(dtype)
    steps = (scale.codes / factor) + offset
    assert steps.dtype is dtype
    numbers = torch.tensor(fmt.values, dtype=dtype)[w.codes.int()]
    told = (numbers.view(8, 8, 16) * steps.unsqueeze(-1)).view(8, 128)
    assert torch.equal(w.dequantize(), told)
    assert torch.equal(dequantize(w.plain_parts(), spec.with_(layout="plain"), w.shape, dtype), told)
    once = QuantSpec(get_format("nf4"), (16,), scale=spec.scale)
    assert once.format.rounding is None
