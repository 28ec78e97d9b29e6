"""Every number format, by being registered: what a set of numbers and its rounding promise."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pennyweight.core.formats import E8M0, Format, all_formats, get_format, small_float, table

FORMATS = pytest.mark.parametrize("fmt", all_formats(), ids=str)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def codes_of(fmt: Format) -> Tensor:
    """Every code that stands for a number."""
    if fmt.kind == "int":
        return torch.arange(int(fmt.lo), int(fmt.hi) + 1).to(fmt.code_dtype)
    codes = torch.arange(len(fmt.values) or 256, dtype=torch.uint8)
    if fmt.native_float:
        codes = codes.view(fmt.code_dtype)
    return codes[fmt.decode(codes).isfinite()]


def bits_of(codes: Tensor) -> list[int]:
    return codes.view(torch.uint8).tolist()


def probes(fmt: Format) -> Tensor:
    """Numbers all over the range and around every decision between two neighbours. float32."""
    values = fmt.decode(codes_of(fmt), torch.float64).unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    beside = [torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)]
    inside = torch.rand(500, dtype=torch.float64) * (values[-1] - values[0]) + values[0]
    near_zero = torch.randn(200, dtype=torch.float64).exp() * values[values > 0][:1] if fmt.hi > 0 else inside
    far = torch.tensor([2 * fmt.lo, 1.5 * fmt.hi, 0.0, -0.0], dtype=torch.float64)
    return torch.cat([values.float(), middle, *beside, inside.float(), near_zero.float(), far.float()])


@FORMATS
def test_every_code_is_the_code_of_its_number(fmt: Format) -> None:
    codes = codes_of(fmt)
    own = bits_of(codes)
    if fmt.kind == "table":  # a number that stands there twice has the first of its codes
        own = [fmt.values.index(v) for v in fmt.values]
    assert bits_of(fmt.encode(fmt.decode(codes))) == own
    assert len(codes) <= 1 << fmt.bits
    values = fmt.decode(codes)
    assert (values.min(), values.max()) == (torch.tensor(fmt.lo), torch.tensor(fmt.hi))


@FORMATS
def test_numbers_are_those_of_its_codes(fmt: Format) -> None:
    numbers = fmt.numbers()
    assert bool((numbers[1:] > numbers[:-1]).all())
    assert set(numbers.tolist()) == set(fmt.decode(codes_of(fmt)).tolist())


@FORMATS
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_rounds_once_to_the_dtype(fmt: Format, dtype: torch.dtype) -> None:
    codes = codes_of(fmt)
    exact = fmt.decode(codes, torch.float64)
    got = fmt.decode(codes, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, exact.to(dtype))


@FORMATS
def test_encode_takes_the_nearest_number(fmt: Format) -> None:
    x = probes(fmt)
    values = fmt.decode(codes_of(fmt), torch.float64)
    got = fmt.decode(fmt.encode(x), torch.float64)
    distance = (got - x.double()).abs()
    least = (values[:, None] - x.double()).abs().amin(0)
    # the numbers of a table are not float32, so a decision between two of them is known to float32's precision
    slack = 2 * torch.finfo(torch.float32).eps * x.double().abs() * (fmt.kind == "table")
    assert (distance <= least + slack).all()


@pytest.mark.parametrize("fmt", [f for f in all_formats() if f.kind != "table"], ids=str)
def test_a_tie_goes_to_the_even_code(fmt: Format) -> None:
    values = fmt.decode(codes_of(fmt), torch.float64).unique()
    middle = (values[1:] + values[:-1]) / 2
    assert torch.equal(middle, middle.float().double())
    codes = fmt.encode(middle.float())
    assert (codes.view(torch.uint8) % 2 == 0).all()


@FORMATS
@pytest.mark.parametrize("dtype", FLOATS)
def test_beyond_the_range_saturates(fmt: Format, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    ends = torch.tensor([-torch.inf, -top, top, torch.inf], dtype=dtype)
    got = fmt.decode(fmt.encode(ends), torch.float64)
    bottom, high = fmt.decode(codes_of(fmt), torch.float64).aminmax()
    assert got[0] == bottom
    assert got[3] == high
    if top > fmt.hi:
        assert got[1] == bottom
        assert got[2] == high


@FORMATS
def test_encode_is_monotonic(fmt: Format) -> None:
    x = probes(fmt).sort().values
    assert (fmt.decode(fmt.encode(x), torch.float64).diff() >= 0).all()


@FORMATS
def test_encode_takes_any_shape_and_strides(fmt: Format) -> None:
    x = probes(fmt)[:24].reshape(2, 3, 4)
    want = fmt.encode(x.contiguous())
    for view in (x.permute(2, 0, 1), x[:, ::2], x[0, 0, 0], x[:0], x[:, None, :1].expand(2, 5, 1, 4)):
        got = fmt.encode(view)
        assert got.shape == view.shape
        assert got.dtype == fmt.code_dtype
        assert bits_of(got.contiguous().reshape(-1)) == bits_of(fmt.encode(view.contiguous()).reshape(-1))
    assert bits_of(want.reshape(-1)) == bits_of(fmt.encode(x.reshape(-1)))


@FORMATS
def test_unsigned_codes_fit_the_bits_and_come_back(fmt: Format) -> None:
    codes = codes_of(fmt)
    unsigned = fmt.to_unsigned(codes)
    assert unsigned.dtype == torch.uint8
    assert int(unsigned.max()) < 1 << fmt.bits
    assert len(unsigned.unique()) == len(codes)
    assert bits_of(fmt.from_unsigned(unsigned)) == bits_of(codes)
    if fmt.kind == "int":  # ascending, so that files and kernels may count from the least number
        assert unsigned.tolist() == list(range(len(codes)))


@FORMATS
def test_a_format_is_one_object(fmt: Format) -> None:
    assert get_format(fmt.name) is fmt
    assert pickle.loads(pickle.dumps(fmt)) is fmt
    assert copy.deepcopy(fmt) is fmt


def test_the_codes_without_a_number_are_not_numbers() -> None:
    assert E8M0.decode(torch.tensor([255], dtype=torch.uint8)).isnan().all()


WRONG: dict[str, Callable[[], Format]] = {
    "exists already": lambda: table("nf4", (0.0, 1.0)),
    "must be in ascending order": lambda: table("backwards", (1.0, 0.0)),
    r"bits must be in 1\.\.8": lambda: small_float("e5m10", 5, 10),
    "unknown number format 'int9' .*; known are int1 to int8": lambda: get_format("int9"),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_format_cannot_be_made(words: str) -> None:
    before = all_formats()
    with pytest.raises(ValueError, match=words):
        WRONG[words]()
    assert all_formats() == before
