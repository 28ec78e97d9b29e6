"""Chains of convolutions beside separate calls and the plain reference: values, sizes, threads, instruction sets."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pennyweight.core.formats import INT4, INT8, UINT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.conv_chain import (
    FUNCTIONS,
    AddStep,
    ConvChain,
    ConvStep,
    InputStep,
    MaxStep,
    MeanStep,
    fits,
    formats,
    run_reference,
)
from pennyweight.kernels.cpu import library
from pennyweight.kernels.native.conv_chain import NativeChain, compile_chain
from pennyweight.support.errors import ArgumentError

pytestmark = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))

LAST, PLAIN = torch.channels_last, torch.contiguous_format
CHANNEL = QuantSpec(INT8, (-1, -1, -1))
STATIC = ActivationSpec(QuantSpec(INT8, None), "static")
STATIC_ZERO = ActivationSpec(QuantSpec(UINT8, None, zero_point=True), "static")
# weight [o, c / groups, kh, kw]; input h, w; stride, padding, dilation, groups
CASES: dict[str, tuple[Any, ...]] = {
    "1x1": ((64, 64, 1, 1), (7, 7), 1, 0, 1, 1),
    "1x1 stride 2": ((33, 20, 1, 1), (9, 8), 2, 0, 1, 1),
    "9 tiles": ((144, 24, 1, 1), (8, 9), 1, 0, 1, 1),
    "3x3 many channels": ((130, 100, 3, 3), (9, 9), 1, 1, 1, 1),
    "3x3 stride 2": ((17, 5, 3, 3), (13, 10), 2, 1, 1, 1),
    "5x5 dilated": ((33, 5, 5, 5), (13, 9), 1, 2, 2, 1),
    "7x7 of images": ((64, 3, 7, 7), (29, 31), 2, 3, 1, 1),
    "kernel, stride, padding, dilation of two sizes": ((8, 3, 2, 3), (6, 7), (1, 2), (1, 2), (2, 1), 1),
    "padding without input": ((5, 3, 3, 3), (1, 1), 1, 2, 1, 1),
    "two groups": ((64, 16, 3, 3), (10, 11), 2, 1, 1, 2),
    "groups of one tile": ((48, 8, 3, 3), (10, 11), 1, 1, 2, 3),
    "depthwise": ((35, 1, 3, 3), (15, 30), 1, 1, 1, 35),
    "depthwise stride 2": ((96, 1, 3, 3), (21, 35), 2, 1, 1, 96),
    "depthwise 5x5": ((16, 1, 5, 5), (12, 23), 1, 2, 1, 16),
    "depthwise 5x5 stride 2": ((80, 1, 5, 5), (12, 43), 2, 2, 1, 80),
    "depthwise dilated": ((16, 1, 3, 3), (12, 13), 1, 2, 2, 16),
    "depthwise 7x7": ((130, 1, 7, 7), (12, 13), 1, 3, 1, 130),
}


@pytest.fixture
def each_isa() -> Iterator[list[str]]:
    """Instruction sets of this machine; the best is in use again afterwards."""
    yield library.isas()
    library.use_isa("")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def weight(shape: tuple[int, ...], scale: float = 0.03, act: ActivationSpec = STATIC, spec: QuantSpec = CHANNEL) -> QT:
    w = QT.from_float(torch.randn(shape) / math.prod(shape[1:]) ** 0.5, spec, act=act)
    if act.mode == "static":
        w = w.with_(act_scale=torch.tensor([scale]))
        if act.spec.zero_point:
            w = w.with_(act_zero_point=torch.tensor([117], dtype=act.spec.zero_point_dtype))
    return w.to_layout("cpu_conv")


def native(*steps: Any, outputs: tuple[int, ...]) -> NativeChain:
    chain = compile_chain(ConvChain(steps, outputs))
    assert not isinstance(chain, str), chain
    return chain


def alone(s: ConvStep, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The step by the separate kernels and torch."""
    y = FUNCTIONS[s.function](F.conv2d(x, s.weight, s.bias, s.stride, s.padding, s.dilation, s.groups))
    return (y if residual is None else y + residual).clamp(s.lo, s.hi)


def near(a: list[Tensor], b: list[Tensor]) -> None:
    """Equal to the reference, but for codes that its other rounding moves by one."""
    for y, want in zip(a, b, strict=True):
        assert y.shape == want.shape
        assert float((y - want).abs().mean()) <= 1e-3 * float(want.abs().mean())


@pytest.mark.parametrize("act", [STATIC, STATIC_ZERO], ids=["symmetric", "zero point"])
@pytest.mark.parametrize("name", CASES)
def test_two_convolutions_have_the_bits_of_separate_calls(name: str, act: ActivationSpec, threads: int) -> None:
    shape, (h, w), stride, padding, dilation, groups = CASES[name]
    geometry = pair(stride), pair(padding), pair(dilation), groups
    first = ConvStep(0, 1, weight(shape, act=act), torch.randn(shape[0]), *geometry, lo=0.0)
    second = ConvStep(1, 2, weight((24, shape[0], 3, 3), 0.05), None, padding=(1, 1))
    for batch in (1, 3):
        for form in (PLAIN, LAST):
            x = torch.randn(batch, shape[1] * groups, h, w).contiguous(memory_format=form)
            before = x.clone()
            want = {1: alone(first, x)}
            want[2] = alone(second, want[1])
            for outputs in ((2,), (1, 2), (1,)):
                steps = (InputStep(0, 0), first, second)[: 1 + max(outputs)]
                chain = native(*steps, outputs=outputs)
                got = chain.run([x])
                assert got is not None
                assert all(torch.equal(y, want[i]) for i, y in zip(outputs, got, strict=True))
                near(got, run_reference(chain.chain, [x]))
            assert torch.equal(x, before)


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f])
def test_functions(function: str) -> None:
    first = ConvStep(0, 1, weight((33, 20, 1, 1)), torch.randn(33), function=function)
    x = torch.randn(2, 20, 5, 7)
    chain = native(InputStep(0, 0), first, outputs=(1,))
    got = chain.run([x])
    assert got is not None
    torch.testing.assert_close(got[0], alone(first, x), rtol=1e-5, atol=3e-6)
    second = ConvStep(1, 2, weight((8, 33, 3, 3)), None)
    chain = native(InputStep(0, 0), first, second, outputs=(2,))
    near(chain.run([x]) or [], run_reference(chain.chain, [x]))


@pytest.mark.parametrize("channels", [3, 16, 35, 64])
def test_a_residual_block_with_pooling(channels: int, threads: int) -> None:
    """clip(conv(relu6(conv(x))) + x), the residual as numbers and as codes; both kinds of pooling; a mean."""
    stem = ConvStep(0, 1, weight((channels, 3, 3, 3)), torch.randn(channels), (2, 2), (1, 1), lo=0.0)
    pool = MaxStep(1, 2, (3, 3), (2, 2), (1, 1))
    one = ConvStep(2, 3, weight((40, channels, 1, 1)), torch.randn(40), lo=0.0, hi=6.0)
    two = ConvStep(3, 4, weight((channels, 40, 3, 3)), None, padding=(1, 1), residual=2, lo=0.0)
    down = MaxStep(4, 5, (2, 2), (2, 2))
    last = ConvStep(5, 6, weight((24, channels, 1, 1)), None)
    added = AddStep(6, 7, 6, -1.0, 2.0)
    mean = MeanStep(7, 8)
    chain = native(InputStep(0, 0), stem, pool, one, two, down, last, added, mean, outputs=(7, 8))
    assert chain.formats[1].numbers  # the residual is made of them
    assert not chain.formats[3].numbers
    assert chain.formats[4] == chain.formats[5]  # codes, which the pool reads
    assert not chain.formats[4].numbers
    for batch in (1, 2, 3, 9):
        x = torch.randn(batch, 3, 37, 30)
        a = alone(stem, x)
        b = F.max_pool2d(a, 3, 2, 1)
        d = alone(two, alone(one, b), b)
        e = alone(last, F.max_pool2d(d, 2))
        f = (e + e).clamp(-1, 2)
        got = chain.run([x])
        assert got is not None
        assert torch.equal(got[0], f)
        torch.testing.assert_close(got[1], f.mean((2, 3), keepdim=True), rtol=1e-5, atol=1e-6)
        near(got, run_reference(chain.chain, [x]))


def test_readers_with_other_scales_and_several_inputs(threads: int) -> None:
    left, right = ConvStep(0, 2, weight((20, 8, 3, 3), 0.02), None), ConvStep(0, 3, weight((20, 8, 3, 3), 0.04), None)
    both = AddStep(2, 4, 3)
    more = AddStep(4, 5, 1, 0.0)
    chain = native(InputStep(0, 0), InputStep(1, 1), left, right, both, more, outputs=(5,))
    assert len(chain.chain.steps) == 7  # one more makes the other codes
    for batch in (1, 5):
        x, y = torch.randn(batch, 8, 9, 11), torch.randn(batch, 20, 7, 9)
        got = chain.run([x, y])
        assert got is not None
        assert torch.equal(got[0], (alone(left, x) + alone(right, x) + y).clamp_min(0))


def test_instruction_sets_and_batches_give_the_same_bits(each_isa: list[str]) -> None:
    w = [weight((32, 3, 3, 3)), weight((32, 1, 3, 3)), weight((72, 32, 1, 1)), weight((40, 72, 3, 3), act=STATIC_ZERO)]
    steps = (
        InputStep(0, 0), ConvStep(0, 1, w[0], torch.randn(32), (2, 2), (1, 1), lo=0.0),
        ConvStep(1, 2, w[1], None, (1, 1), (1, 1), groups=32, lo=0.0, hi=6.0),
        ConvStep(2, 3, w[2], None, function="silu"), ConvStep(3, 4, w[3], None, lo=-1.0), MeanStep(4, 5),
    )  # fmt: skip
    chain, x = native(*steps, outputs=(4, 5)), torch.randn(3, 3, 33, 31)
    found = []
    for isa in each_isa:
        library.use_isa(isa)
        found.append(chain.run([x]))
        for i in range(3):
            one = chain.run([x[i : i + 1]])
            assert all(torch.equal(a[i : i + 1], b) for a, b in zip(found[-1] or [], one or [], strict=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0] or [], other or [], strict=True))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_input_that_is_not_finite_gives_nan_for_its_sample(odd: float, threads: int) -> None:
    chain = native(
        InputStep(0, 0), ConvStep(0, 1, weight((8, 3, 3, 3)), None), ConvStep(1, 2, weight((8, 8, 1, 1)), None),
        outputs=(2,),
    )  # fmt: skip
    for batch in (1, 4):
        for form in (PLAIN, LAST):
            x = torch.randn(batch, 3, 20, 20).contiguous(memory_format=form)
            x[batch - 1, 1, 7, 3] = odd
            (y,) = chain.run([x]) or [torch.empty(0)]
            assert bool(y[batch - 1].isnan().all())
            assert bool(y[: batch - 1].isfinite().all())


def test_sizes_may_change_from_call_to_call() -> None:
    step = ConvStep(0, 1, weight((8, 3, 3, 3)), None)
    chain = native(InputStep(0, 0), step, outputs=(1,))
    for h in (3, 9, 4, 20, 3, 5, 6, 7, 8, 10, 11, 12, 9):
        x = torch.randn(2, 3, h, h + 1)
        assert torch.equal((chain.run([x]) or [])[0], alone(step, x))
    assert (chain.run([torch.randn(0, 3, 5, 5)]) or [])[0].shape == (0, 8, 3, 3)


def test_refusals() -> None:
    assert fits(torch.randn(3), 1) == "the weight is not quantized"
    assert "static" in fits(weight((8, 4, 1, 1), act=ActivationSpec(CHANNEL)), 1)
    assert "int8" in fits(weight((8, 4, 1, 1), spec=QuantSpec(INT4, (-1, -1, -1))), 1)
    assert "depthwise" in fits(weight((8, 1, 3, 3)), 4)
    assert "multiples" in fits(weight((8, 6, 3, 3)), 2)
    bad = ConvStep(0, 1, weight((8, 4, 1, 1)), torch.full((8,), math.nan))
    assert compile_chain(ConvChain((InputStep(0, 0), bad), (1,))) == "a bias is not finite"


def test_errors() -> None:
    step = ConvStep(0, 1, weight((8, 4, 3, 3)), None)
    chain = native(InputStep(0, 0), step, AddStep(1, 2, 0), outputs=(2,))
    with pytest.raises(ArgumentError, match="expected 1 inputs, got 2"):
        chain.run([torch.randn(1, 4, 5, 5)] * 2)
    with pytest.raises(ArgumentError, match="got 3 input channels"):
        chain.run([torch.randn(1, 3, 5, 5)])
    with pytest.raises(ArgumentError, match="makes an empty tensor"):
        chain.run([torch.randn(1, 4, 2, 2)])
    with pytest.raises(ArgumentError, match="a residual of"):
        chain.run([torch.randn(1, 4, 5, 5)])
    assert chain.run([torch.randn(1, 4, 5, 5).double()]) is None
    assert chain.run([torch.randn(4, 5, 5)]) is None
    pool = native(InputStep(0, 0), MaxStep(0, 1, (2, 2), (2, 2), (1, 1)), outputs=(1,))
    assert torch.equal((pool.run([torch.ones(1, 2, 4, 4)]) or [])[0], torch.ones(1, 2, 3, 3))
    with pytest.raises(ArgumentError, match="more than half"):
        native(InputStep(0, 0), MaxStep(0, 1, (2, 2), (1, 1), (2, 2)), outputs=(1,)).run([torch.ones(1, 2, 4, 4)])
    step = ConvStep(0, 1, weight((8, 4, 3, 3)), None)
    chain = native(InputStep(0, 0), step, outputs=(1,))
    assert chain.run([torch.randn(1, 4, 5, 5)]) is not None
    step.weight.parts.codes.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="rejected inconsistent arguments"):
        chain.run([torch.randn(1, 4, 5, 5)])


def test_formats_of_pools() -> None:
    """A pool passes codes on, unless its input has other codes or something reads the numbers."""
    a, b = weight((8, 4, 1, 1), 0.02), weight((8, 4, 1, 1), 0.05)
    pool = MaxStep(0, 1, (2, 2), (2, 2))
    _, same = formats(ConvChain((InputStep(0, 0), pool, ConvStep(1, 2, a), ConvStep(0, 3, a)), (2, 3)))
    assert not same[0].numbers
    _, other = formats(ConvChain((InputStep(0, 0), pool, ConvStep(1, 2, a), ConvStep(0, 3, b)), (2, 3)))
    assert other[0].numbers
    _, read = formats(ConvChain((InputStep(0, 0), pool, ConvStep(1, 2, a)), (1, 2)))
    assert read[0].numbers
    assert read[0].codes is None
