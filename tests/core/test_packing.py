"""Bit streams against a stream made with Python's own integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pennyweight.core.packing import pack_bits, unpack_bits

BITS = pytest.mark.parametrize("bits", range(1, 9))


def stream(codes: list[int], bits: int) -> list[int]:
    """Bytes of the integer whose bits [i*b, (i+1)*b) are code i."""
    number = sum(code << (i * bits) for i, code in enumerate(codes))
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


@BITS
@pytest.mark.parametrize("n", range(1, 34))
def test_rows_are_streams_of_their_own(bits: int, n: int) -> None:
    codes = torch.randint(0, 1 << bits, (2, 3, n), dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 0, (1 << bits) - 1
    packed = pack_bits(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[stream(row, bits) for row in matrix] for matrix in codes.tolist()]
    assert torch.equal(unpack_bits(packed, bits, n), codes)
    assert packed.is_contiguous()


@given(st.integers(1, 8).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(0, (1 << b) - 1), max_size=70))))
def test_any_row(case: tuple[int, list[int]]) -> None:
    bits, row = case
    packed = pack_bits(torch.tensor(row, dtype=torch.uint8), bits)
    assert packed.tolist() == stream(row, bits)
    assert unpack_bits(packed, bits, len(row)).tolist() == row


@BITS
def test_strided_empty_and_single(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 14), dtype=torch.uint8)
    for view in (codes.t(), codes[:, ::2], codes[::2]):
        packed = pack_bits(view, bits)
        assert torch.equal(packed, pack_bits(view.contiguous(), bits))
        assert torch.equal(unpack_bits(packed, bits, view.shape[-1]), view)
    for shape in ((0,), (0, 5), (5, 0)):
        empty = torch.zeros(shape, dtype=torch.uint8)
        assert pack_bits(empty, bits).shape == (*shape[:-1], -(-shape[-1] * bits // 8))
        assert unpack_bits(pack_bits(empty, bits), bits, shape[-1]).shape == shape
    one = codes[0, 0]
    assert torch.equal(unpack_bits(pack_bits(one, bits), bits, 1), one)
