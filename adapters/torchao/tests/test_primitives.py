"""Affine primitives: arguments of both eras, errors, dtypes, shapes, gradients, and torchao's defects put right."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pennyweight.planning.granularity import PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
from pennyweight_torchao.enums import MappingType, TorchAODType, ZeroPointDomain
from pennyweight_torchao.groupwise import compute_error
from pennyweight_torchao.primitives import (
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_no_zero_point,
    _fake_quantize_affine,
    _fake_quantize_affine_cachemask,
    _quantize_affine_no_zero_point,
    choose_qparams_affine,
    choose_qparams_affine_with_min_max,
    dequantize_affine,
    quantize_affine,
)
from pennyweight_torchao.qparams import (
    _DTYPE_TO_BIT_WIDTH,
    _DTYPE_TO_QVALUE_BOUNDS,
    _get_and_check_qmin_qmax,
    _get_reduction_params,
    get_block_size,
)

SYM, ASYM, NO_CLIP = MappingType.SYMMETRIC, MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE
VECTOR = torch.tensor([-3.5, 0.0, 1.0, 10.2])


@pytest.mark.parametrize(
    ("mapping", "bounds", "scale", "zero_point", "codes"),
    [
        (SYM, (None, None), 0.08, 0, [-44, 0, 12, 127]),
        (SYM, (-8, 7), 1.36, 0, [-3, 0, 1, 7]),
        (NO_CLIP, (-8, 7), 1.457, 0, [-2, 0, 1, 7]),
        (ASYM, (None, None), 0.0537255, -63, [-128, -63, -44, 127]),
    ],
)
def test_by_hand(mapping: MappingType, bounds: Any, scale: float, zero_point: int, codes: list[int]) -> None:
    got_scale, got_zero = choose_qparams_affine(VECTOR, mapping, (4,), torch.int8, *bounds)
    assert float(got_scale) == pytest.approx(scale, rel=1e-3)
    assert (int(got_zero), got_zero.dtype) == (zero_point, torch.int32)
    assert quantize_affine(VECTOR, (4,), got_scale, got_zero, torch.int8, *bounds).tolist() == codes


def test_arguments_of_both_eras() -> None:
    x = torch.randn(4, 32)
    first_nine = (x, ASYM, (1, 16), torch.uint8, 0, 15, 1e-6, torch.float32, torch.float32)
    kept, _ = choose_qparams_affine(*first_nine, keepdim=True)
    assert kept.shape == (4, 2)
    named = choose_qparams_affine(*first_nine, preserve_zero=False, zero_point_domain=FLOAT)
    for a, b in zip(choose_qparams_affine(*first_nine, False, FLOAT), named, strict=True):
        assert torch.equal(a, b)
    tinygemm = _choose_qparams_affine_tinygemm(*first_nine)
    assert all(torch.equal(a, b) for a, b in zip(tinygemm, named, strict=True))
    with pytest.raises(TypeError, match="may mean keepdim or preserve_zero"):
        choose_qparams_affine(*first_nine, True)
    codes = quantize_affine(x, (1, 16), *named, torch.uint8, 0, 15, FLOAT)
    back = dequantize_affine(codes, (1, 16), *named, torch.uint8, 0, 15, FLOAT, output_dtype=torch.float32)
    assert compute_error(x, back) > 18
    with pytest.raises(TypeError):
        dequantize_affine(codes, (1, 16), *named, torch.uint8, 0, 15, FLOAT, torch.float32)  # type: ignore[misc]


def test_zero_point_dtypes_by_default() -> None:
    """int32, whatever the mapping (torchao's symmetric min_max gives floats); real in the float domain."""
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    for mapping in MappingType:
        assert choose_qparams_affine(x, mapping, (1, 8), torch.int8)[1].dtype is torch.int32
        given = choose_qparams_affine_with_min_max(x.amin(1), x.amax(1), mapping, [], torch.int8)
        assert given[1].dtype is torch.int32
        for a, b in zip(given, choose_qparams_affine(x, mapping, (1, 8), torch.int8), strict=True):
            assert torch.equal(a, b)
    old = choose_qparams_affine(x, ASYM, (1, 8), torch.uint8, preserve_zero=False, zero_point_domain=FLOAT)
    assert [t.dtype for t in old] == [torch.bfloat16, torch.bfloat16]
    assert choose_qparams_affine(x, SYM, (1, 8), torch.int8, zero_point_domain=NONE)[1] is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eps_is_the_smallest_normal_number(dtype: torch.dtype) -> None:
    zeros = torch.zeros(3, 8, dtype=dtype)
    for mapping in MappingType:
        scale, zero_point = choose_qparams_affine(zeros, mapping, (1, 8), torch.int8)
        assert (scale == torch.finfo(dtype).smallest_normal).all()
        codes = quantize_affine(zeros, (1, 8), scale, zero_point, torch.int8)
        back = dequantize_affine(codes, (1, 8), scale, zero_point, torch.int8, output_dtype=dtype)
        assert torch.equal(back, zeros)
    assert (choose_qparams_affine(zeros, SYM, (1, 8), torch.int8, eps=0.5)[0] == 0.5).all()


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_of_choosing() -> None:
    x = torch.randn(4, 30)
    with pytest.raises(AssertionError, match="Expecting input size at 1 dimension"):
        choose_qparams_affine(x, SYM, (1, 16), torch.int8)
    with pytest.raises(AssertionError, match="Got input dim"):
        choose_qparams_affine(x, SYM, (30,), torch.int8)
    with pytest.raises(AssertionError, match="quant_min out of bound for dtype"):
        choose_qparams_affine(x, SYM, (1, 30), torch.int8, -129)
    with pytest.raises(AssertionError, match="quant_max out of bound for dtype"):
        choose_qparams_affine(x, SYM, (1, 30), torch.int4, -8, 8)
    with pytest.raises(ValueError, match="Unsupported dtype"):
        choose_qparams_affine(x, SYM, (1, 30), torch.int64)
    with pytest.raises(ValueError, match="instead of None"):
        choose_qparams_affine(x, SYM, (1, 30), torch.int8, zero_point_domain=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="preserve_zero == False"):
        choose_qparams_affine(x, SYM, (1, 30), torch.int8, preserve_zero=False)
    with pytest.raises(ValueError, match="for symmetric quantization"):
        choose_qparams_affine(x, NO_CLIP, (1, 30), torch.int8, zero_point_domain=FLOAT)
    for choose in (_choose_qparams_affine_tinygemm, _choose_qparams_affine_dont_preserve_zero):
        with pytest.raises(AssertionError, match="Unsupported mapping type"):
            choose(x, SYM, (1, 30), torch.int8)
    with pytest.raises(AssertionError, match="Only symmetric quantization"):
        choose_qparams_affine(x, ASYM, (1, 30), torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match="differ in dtype"):
        choose_qparams_affine_with_min_max(x.amin(1), x.amax(1).half(), SYM, [], torch.int8)


def test_errors_of_quantizing() -> None:
    x, scale, zero_point = torch.randn(4, 32), torch.ones(4), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(AssertionError, match="Unsupported input dtype"):
        quantize_affine(x.double(), (1, 32), scale, zero_point, torch.int8)
    with pytest.raises(RuntimeError, match=r"scale: .* is invalid for input of size 4; block_size makes 8 blocks"):
        quantize_affine(x, (1, 16), scale, zero_point, torch.int8)
    with pytest.raises(RuntimeError, match=r"zero_point: .* is invalid for input of size 3"):
        quantize_affine(x, (1, 32), scale, zero_point[:3], torch.int8)
    with pytest.raises(ValueError, match="instead of None"):
        quantize_affine(x, (1, 32), scale, zero_point, torch.int8, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero_point should be None"):
        quantize_affine(x, (1, 32), scale, zero_point, torch.int8, zero_point_domain=NONE)
    codes = quantize_affine(x, (1, 32), scale, zero_point, torch.int8)
    with pytest.raises(AssertionError, match=r"Expected: torch.uint8, got: torch.int8"):
        dequantize_affine(codes, (1, 32), scale, zero_point, torch.uint8)
    with pytest.raises(AssertionError, match="Unsupported output dtype"):
        dequantize_affine(codes, (1, 32), scale, zero_point, torch.int8, output_dtype=torch.float64)
    with pytest.raises(AssertionError, match="zero_point should be None"):
        _dequantize_affine_no_zero_point(codes, (1, 32), scale, zero_point, torch.int8)
    with pytest.raises(ValueError, match="zero_point should be None"):
        _fake_quantize_affine(x, (1, 32), scale, zero_point, torch.int8, zero_point_domain=NONE)


# -- what torchao gets wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 8))
def test_codes_of_less_than_a_byte(bits: int) -> None:
    """torch.intN as an output dtype fails in torchao."""
    x = torch.randn(4, 32)
    for kind, stored in (("uint", torch.uint8), ("int", torch.int8)):
        dtype = getattr(torch, f"{kind}{bits}")
        scale, zero_point = choose_qparams_affine(x, ASYM, (1, 16), dtype)
        codes = quantize_affine(x, (1, 16), scale, zero_point, dtype)
        low, high = _DTYPE_TO_QVALUE_BOUNDS[dtype]
        assert codes.dtype is stored
        assert (int(codes.min()), int(codes.max())) == (low, high)
        back = dequantize_affine(codes, (1, 16), scale, zero_point, dtype)
        steps = ((back - x).abs() / scale.repeat_interleave(16, 1)).max()
        assert steps <= 1.001  # half a step of the code and half of the zero point
        assert _DTYPE_TO_BIT_WIDTH[dtype] == bits
    old = TorchAODType[f"INT{bits}"]
    assert torch.equal(quantize_affine(x, (1, 16), scale, zero_point, old), codes)


def test_no_zero_point() -> None:
    """A zero point of None fails in torchao's quantize_affine."""
    x = torch.randn(4, 32)
    scale, zero_point = choose_qparams_affine(x, SYM, (1, 32), torch.int8)
    want = quantize_affine(x, (1, 32), scale, zero_point, torch.int8)
    for none in (None, torch.empty(0)):
        assert torch.equal(quantize_affine(x, (1, 32), scale, none, torch.int8), want)
    assert torch.equal(_quantize_affine_no_zero_point(x, (1, 32), scale, zero_point, torch.int8), want)
    values = dequantize_affine(want, (1, 32), scale, zero_point, torch.int8)
    assert torch.equal(dequantize_affine(want, (1, 32), scale, None, torch.int8), values)
    assert torch.equal(_fake_quantize_affine(x, (1, 32), scale, None, torch.int8), values)
    mid = dequantize_affine(want, (1, 32), scale, None, torch.int8, zero_point_domain=FLOAT)
    assert torch.equal(quantize_affine(mid, (1, 32), scale, None, torch.int8, zero_point_domain=FLOAT), want)


def test_the_cachemask_tells_what_was_clamped() -> None:
    """torchao's is always true, and fails where the bounds are left to the dtype."""
    x = torch.tensor([[-300.0, -128.0, 0.0, 127.4, 128.0]])
    values, mask = _fake_quantize_affine_cachemask(x, (1, 5), torch.ones(1), torch.zeros(1), torch.int8)
    assert mask.tolist() == [[False, True, True, True, False]]
    assert values.tolist() == [[-128, -128, 0, 127, 127]]
    _, mask = _fake_quantize_affine_cachemask(x, (1, 5), torch.ones(1), torch.full((1,), 150), torch.uint8, 0, 255)
    assert mask.tolist() == [[False, True, True, False, False]]


def test_any_strides() -> None:
    """torchao needs inputs that can be viewed."""
    x = torch.randn(6, 4, 32).permute(1, 2, 0)  # [4, 32, 6]
    for block in ((1, 8, 6), (4, 32, 6), (2, 32, 1)):
        mine = choose_qparams_affine(x, ASYM, block, torch.int8)
        plain = choose_qparams_affine(x.contiguous(), ASYM, block, torch.int8)
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))
        codes = quantize_affine(x, block, *mine, torch.int8)
        assert torch.equal(codes, quantize_affine(x.contiguous(), block, *mine, torch.int8))


def test_blocks_of_one_element() -> None:
    """torchao reduces the whole tensor where no axis is to be reduced."""
    x = torch.randn(3, 4)
    scale, zero_point = choose_qparams_affine(x, SYM, (1, 1), torch.int8)
    assert scale.shape == (3, 4)
    codes = quantize_affine(x, (1, 1), scale, zero_point, torch.int8)
    assert torch.equal(codes.int(), torch.where(x > 0, 127, -128).int())


def test_one_sided_ranges() -> None:
    """int1 has no positive code; torchao divides by it."""
    scale, _ = choose_qparams_affine(torch.tensor([[-2.0, 1.0]]), NO_CLIP, (1, 2), torch.int1)
    assert scale.tolist() == [2.0]


def test_small_and_large_float16() -> None:
    """Reciprocals of float16 below 2**-16 overflow, and so do spans above 65504; torchao gets NaN and inf."""
    zeros = torch.zeros(1, 8, dtype=torch.float16)
    scale, zero_point = choose_qparams_affine(zeros, ASYM, (1, 8), torch.int8, eps=1e-5)
    assert quantize_affine(zeros, (1, 8), scale, zero_point, torch.int8).eq(zero_point).all()
    wide = torch.tensor([[-60000.0, 0.0, 30000.0, 60000.0]], dtype=torch.float16)
    scale, zero_point = choose_qparams_affine(wide, ASYM, (1, 4), torch.int8)
    codes = quantize_affine(wide, (1, 4), scale, zero_point, torch.int8)
    back = dequantize_affine(codes, (1, 4), scale, zero_point, torch.int8)
    assert (back - wide).abs().max() <= scale.float().max()
    zero_scale = quantize_affine(torch.ones(1, 4), (1, 4), torch.zeros(1), None, torch.int8)
    assert zero_scale.eq(0).all()


def test_float8_codes_are_not_rounded_to_integers() -> None:
    x = torch.randn(4, 32)
    scale, zero_point = choose_qparams_affine(x, SYM, (1, 32), torch.float8_e4m3fn, zero_point_domain=NONE)
    assert zero_point is None
    codes = quantize_affine(x, (1, 32), scale, None, torch.float8_e4m3fn, zero_point_domain=NONE)
    back = dequantize_affine(codes, (1, 32), scale, None, torch.float8_e4m3fn, zero_point_domain=NONE)
    assert compute_error(x, back) > 29
    assert torch.equal(_fake_quantize_affine(x, (1, 32), scale, None, torch.float8_e4m3fn, None, None, NONE), back)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", [INT, FLOAT, NONE])
def test_fake_quantize_gradients(domain: ZeroPointDomain) -> None:
    x = torch.linspace(-12, 12, 49).reshape(1, 49).requires_grad_()
    scale = torch.ones(1, requires_grad=True)
    zero_point = None if domain is NONE else torch.zeros(1)
    args = ((1, 49), scale, zero_point, torch.int8, -8, 7, domain)
    values, mask = _fake_quantize_affine_cachemask(x, *args)
    assert torch.equal(values, x.detach().round().clamp(-8, 7))
    values.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, mask.float())
    # d/ds s * clamp(round(x / s)) = clamp(..) - x / s inside the range, clamp(..) outside
    want = torch.where(mask, values - x, values).sum().detach()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad[0], want)


def test_choosing_and_quantizing_pass_no_gradient() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    scale, zero_point = choose_qparams_affine(x, ASYM, (1, 8), torch.uint8)
    assert not scale.requires_grad
    assert not quantize_affine(x, (1, 8), scale, zero_point, torch.uint8).requires_grad
    scale = scale.requires_grad_()
    codes = quantize_affine(x, (1, 8), scale, None, torch.uint8)
    dequantize_affine(codes, (1, 8), scale, None, torch.uint8).sum().backward()
    assert scale.grad is not None


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_reduction_params() -> None:
    assert _get_reduction_params((3, 3, 2, 10), (3, 3, 10, 10)) == ([3, 3, 5, 2, 10], [0, 1, 3, 4])
    assert _get_reduction_params((1, -1), (4, 6)) == ([4, 6], [1])
    with pytest.raises(AssertionError, match="one number for each"):
        _get_reduction_params((1,), (4, 6))
    with pytest.raises(AssertionError, match="divisible"):
        _get_reduction_params((1, 0), (4, 6))


def test_block_sizes() -> None:
    shape = (2, 4, 32)
    assert get_block_size(shape, PerTensor()) == (2, 4, 32)
    assert get_block_size(shape, PerAxis(1)) == (2, 1, 32)
    assert get_block_size(shape, PerAxis(-1)) == (2, 4, 1)
    assert get_block_size(shape, PerRow()) == (1, 1, 32)
    assert get_block_size(shape, PerRow(1)) == (1, 4, 1)
    assert get_block_size(shape, PerToken()) == (1, 1, 32)
    assert get_block_size(shape, PerGroup(8)) == (1, 1, 8)
    assert get_block_size(shape, PerBlock((2, 16))) == (1, 2, 16)
    assert get_block_size(shape, PerBlock((1, -1))) == (1, 1, 32)
    with pytest.raises(AssertionError, match="not divisible by group size 5"):
        get_block_size(shape, PerGroup(5))
    with pytest.raises(AssertionError, match="not divisible by block size"):
        get_block_size(shape, PerBlock((3, 16)))
    with pytest.raises(ValueError, match="Unsupported Granularity"):
        get_block_size(shape, 8)  # type: ignore[arg-type]


def test_bounds() -> None:
    assert _get_and_check_qmin_qmax(torch.int4, None, None) == (-8, 7)
    assert _get_and_check_qmin_qmax(TorchAODType.INT3, None, None) == (-4, 3)
    assert _get_and_check_qmin_qmax(torch.int32, None, None) == (-(2**31), 2**31 - 1)
    assert _get_and_check_qmin_qmax(torch.float8_e5m2, None, None) == (-57344.0, 57344.0)
    assert _DTYPE_TO_QVALUE_BOUNDS.keys() == _DTYPE_TO_BIT_WIDTH.keys()
    assert [_DTYPE_TO_BIT_WIDTH[d] for d in (torch.uint8, torch.int16, torch.int32)] == [8, 16, 32]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 3), groups=st.integers(1, 3), size=st.integers(1, 9), mapping=st.sampled_from([*MappingType]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_round_trip_is_off_by_a_step_at_most(
    rows: int, groups: int, size: int, mapping: MappingType, dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(rows, groups * size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    block = (1, size)
    scale, zero_point = choose_qparams_affine(x, mapping, block, torch.int8, scale_dtype=torch.float32, keepdim=True)
    assert scale.shape == zero_point.shape == (rows, groups)
    codes = quantize_affine(x, block, scale, zero_point, torch.int8)
    back = dequantize_affine(codes, block, scale, zero_point, torch.int8)
    assert ((back - x.float()).abs() <= scale.repeat_interleave(size, 1) * 1.02).all()


def test_compiled_without_graph_breaks() -> None:
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        scale, zero_point = choose_qparams_affine(x, ASYM, (1, 16), torch.uint4, keepdim=True)
        codes = quantize_affine(x, (1, 16), scale, zero_point, torch.uint4)
        return dequantize_affine(codes, (1, 16), scale, zero_point, torch.uint4, output_dtype=x.dtype)

    x = torch.randn(4, 32)
    compiled = torch.compile(round_trip, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), round_trip(x))


class PerTokenRoundTrip(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = get_block_size(x.shape, PerToken())
        scale, zero_point = choose_qparams_affine(x, ASYM, block, torch.int8)
        codes = quantize_affine(x, block, scale, zero_point, torch.int8)
        return dequantize_affine(codes, block, scale, zero_point, torch.int8, output_dtype=x.dtype)


def test_exported_for_any_number_of_tokens() -> None:
    model, tokens = PerTokenRoundTrip(), torch.export.Dim("tokens", min=2)
    program = torch.export.export(model, (torch.randn(5, 32),), dynamic_shapes={"x": {0: tokens}})
    for n in (2, 5, 17):
        x = torch.randn(n, 32)
        assert torch.equal(program.module()(x), model(x))


def test_fake_quantization_trains_compiled() -> None:
    """Values, and the gradients of input and scale, are those of eager."""

    def loss(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (_fake_quantize_affine(x, (1, 16), scale, None, torch.int8, -8, 7) * x).sum()

    results = []
    for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-2, 2, 64).reshape(2, 32).requires_grad_()
        scale = torch.full((2, 2), 0.15, requires_grad=True)
        with warnings.catch_warnings():  # dynamo instantiates autograd.Function, which warns
            warnings.filterwarnings("ignore", "<class 'torch.autograd.function.Function'>", DeprecationWarning)
            fn(x, scale).backward()
        results.append((x.grad, scale.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
