"""The algebra of blocks, on any shape."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pennyweight.core import blocks

SHAPES = st.lists(st.integers(0, 9), max_size=5).map(tuple)
Case = tuple[tuple[int, ...] | None, tuple[int, ...]]
BLOCKS = st.none() | st.lists(st.just(-1) | st.integers(1, 12), min_size=1, max_size=5).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A block and a shape that has its axes."""
    block = blocks.normalize(draw(BLOCKS))
    shape = draw(SHAPES.filter(lambda s: block is None or len(s) >= len(block)))
    return block, shape


@given(BLOCKS)
def test_normal_form_is_unique(block: tuple[int, ...] | None) -> None:
    normal = blocks.normalize(block)
    assert blocks.normalize(normal) == normal
    if block is not None:
        assert blocks.normalize((1, 1, *block)) == normal
        assert normal is not None
        assert len(normal) == 1 or normal[0] != 1


@given(cases())
def test_blocks_tile_the_padded_shape(case: Case) -> None:
    block, shape = case
    size, count, padded = blocks.resolve(block, shape), blocks.counts(block, shape), blocks.padded(block, shape)
    for n, b, c, m in zip(shape, size, count, padded, strict=True):
        assert m == c * b
        assert n <= m < n + b or n == m == 0
        assert 1 <= b <= max(1, n)  # a block larger than its axis is the axis
    if block is None and math.prod(shape):
        assert math.prod(count) == 1


@given(cases())
def test_split_and_spread_meet_each_element_with_its_block(
    case: tuple[tuple[int, ...] | None, tuple[int, ...]],
) -> None:
    block, shape = case
    size, count = blocks.resolve(block, shape), blocks.counts(block, shape)
    padded = blocks.padded(block, shape)
    part = torch.arange(math.prod(count)).reshape(count)
    x = torch.zeros(padded, dtype=torch.int64)
    got = (blocks.split(x, count) + blocks.expand(part)).reshape(padded)
    want = part
    for axis, b in enumerate(size):  # the plain way: repeat each block's entry over the block
        want = want.repeat_interleave(b, axis)
    assert torch.equal(got, want)
    assert blocks.split(x, count).data_ptr() == x.data_ptr()
    inner = blocks.inner_axes(len(shape))
    assert [blocks.split(x, count).shape[i] for i in inner] == [
        m // max(1, c) for m, c in zip(padded, count, strict=True)
    ]


@given(cases())
def test_padding_keeps_the_range_of_every_block(case: Case) -> None:
    block, shape = case
    x = torch.arange(math.prod(shape)).reshape(shape)
    y = blocks.pad(x, block)
    assert tuple(y.shape) == blocks.padded(block, shape)
    assert torch.equal(y[tuple(slice(n) for n in shape)], x)
    if not x.numel():
        return
    count, size = blocks.counts(block, shape), blocks.resolve(block, shape)
    view = blocks.split(y, count)
    for index in itertools.islice(itertools.product(*map(range, count)), 20):
        own = x[tuple(slice(i * b, (i + 1) * b) for i, b in zip(index, size, strict=True))]
        there = view[tuple(i for c in index for i in (c, slice(None)))]
        assert set(there.flatten().tolist()) == set(own.flatten().tolist())


@pytest.mark.parametrize("block", [(), (0,), (-2,), (32, 0)])
def test_a_wrong_block_is_refused(block: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each entry is a positive size or -1"):
        blocks.normalize(block)


def test_a_block_needs_its_axes() -> None:
    with pytest.raises(ValueError, match=r"block \(2, 32\) has 2 axes but the tensor of shape \(64,\) has 1"):
        blocks.resolve((2, 32), (64,))


@pytest.mark.parametrize(
    ("block", "shape", "counts"),
    [
        (None, (3, 5), (1, 1)),
        ((-1,), (3, 5), (3, 1)),
        ((32,), (3, 5), (3, 1)),
        ((32,), (3, 65), (3, 3)),
        ((128, 128), (2, 130, 256), (2, 2, 2)),
        ((-1, 2, 1), (4, 3, 5), (1, 2, 5)),
        ((-1,), (0, 5), (0, 1)),
        ((-1,), (5, 0), (5, 0)),
        (None, (), ()),
    ],
)
def test_counts_of_known_shapes(block: tuple[int, ...] | None, shape: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert blocks.counts(block, shape) == counts
