"""The native steps of a block beside their reference, on every instruction set, and what they promise to the bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.block import ACTIVATIONS, Call, Layer, LinearStep, Norm, NormStep, Steps, run_reference
from pennyweight.kernels.cpu import library
from pennyweight.kernels.native.block import NativeBlock, compile_steps
from pennyweight.support.errors import ArgumentError
from tests.kernels.cpu.test_int_linear import ACTIVATIONS as INPUTS
from tests.kernels.cpu.test_int_linear import SPECS, make

pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 17, 200]


@pytest.fixture(params=library.isas() if library.available() is True else [])
def isa(request: Any) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


@pytest.fixture(params=[1, 2])
def threads(request: Any) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compiled(steps: Steps) -> NativeBlock:
    block = compile_steps(steps)
    assert isinstance(block, NativeBlock), block
    return block


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def run(block: NativeBlock, x: torch.Tensor, call: Call | None = None) -> torch.Tensor:
    y = block.run(x, call or Call())
    assert y is not None
    return y


def layer(n: int, k: int, name: str = "row", act: str = "float", dtype: torch.dtype = torch.float32) -> Layer:
    return Layer(make(name, (n, k), dtype, INPUTS[act]).to_layout("cpu"), random(n, dtype=dtype))


def one(n: int, k: int, w: Layer, dtype: torch.dtype = torch.float32, **options: Any) -> Steps:
    return Steps((LinearStep(0, (w,), (1,), **options),), (k, n), dtype)


def norm(kind: Any, width: int, dtype: torch.dtype = torch.float32, **options: Any) -> Norm:
    bias = random(width, dtype=dtype, seed=9) if kind == "layer" else None
    return Norm(kind, 1e-5, random(width, dtype=dtype, seed=8), bias, **options)


# -- to the bit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", INPUTS)
@pytest.mark.parametrize("name", SPECS)
def test_a_linear_step_alone_is_the_linear_layer(isa: str, threads: int, name: str, act: str) -> None:
    """Same bits as F.linear, whose values are tested elsewhere; quantized inputs in float32 models only."""
    for (n, k), dtype, rows in zip([(37, 100), (50, 352), (16, 33)], DTYPES, (1, 17, 3), strict=True):
        if act != "float" and dtype is not torch.float32:
            continue
        w = layer(n, k, name, act, dtype)
        x = random(1, rows, k, dtype=dtype)
        assert torch.equal(run(compiled(one(n, k, w, dtype)), x), F.linear(x, w.weight, w.bias)), (n, k, dtype)


def whole(dtype: torch.dtype, act: str = "float", name: str = "row", k: int = 100, f: int = 48) -> Steps:
    """Every option of linear and norm steps, with odd widths: norms, kept norms, several outputs, gates, residuals."""

    def w(n: int, k: int) -> Layer:
        return layer(n, k, name, act, dtype)

    both = layer(2 * f, k, name, act, dtype)
    return Steps(
        (
            LinearStep(0, (w(k, k), w(37, k), w(f, k)), (2, 3, 4), norm("layer", k, dtype), normed=5),
            LinearStep(3, (w(k, 37),), (6,), act="quick_gelu", residual=5),
            LinearStep(6, (w(29, k), w(29, k)), (7,), norm("rms", k, dtype), act="silu", gated=True),
            LinearStep(7, (w(k, 29),), (6,), residual=6),  # in place
            NormStep(6, 2, norm("layer", k, dtype), residual=2),
            LinearStep(2, (both,), (8,), norm("rms", k, offset=1.0), act="gelu", gated=True, residual=4),
            LinearStep(8, (w(k, f),), (1,), act="relu", residual=0),
            NormStep(1, 1, Norm("rms", 1e-6)),
        ),
        (k, k, k, 37, f, k, k, 29, f),
        dtype,
    )  # fmt: skip


@pytest.mark.parametrize("act", ["float", "int8", "asymmetric"])
@pytest.mark.parametrize("name", ["int4", "row", "tinygemm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_else(isa: str, name: str, act: str, dtype: torch.dtype) -> None:
    """The same bits in any batch, on any number of threads, in plain C++ and on this instruction set."""
    block, x = compiled(whole(dtype, act, name)), random(4, 10, 100, dtype=dtype)
    before = torch.get_num_threads()
    try:
        library.use_isa("scalar")
        torch.set_num_threads(1)
        expected = run(block, x)
        assert expected.isfinite().all()
        library.use_isa(isa)
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(run(block, x), expected)
            for rows in (1, 2, 3, 9):
                assert torch.equal(run(block, x[2:3, :rows]), expected[2:3, :rows]), (count, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_activation_functions(isa: str, function: Any) -> None:
    """Both GELUs within 1e-6 of the exact function, the others within 16 ulps, also for large inputs; NaN is kept."""
    eye = QT.from_float(torch.eye(16), QuantSpec(INT8, (-1,), scale=torch.float32)).to_layout("cpu")
    x = torch.cat([torch.linspace(-12, 12, 4000), torch.tensor([0.0, -0.0, 90.0, -90.0, 1e4, -1e4, 1e-20, -1e-30])])
    x = torch.cat([x, torch.zeros(-len(x) % 16)]).view(1, -1, 16)
    scaled = run(compiled(one(16, 16, Layer(eye))), x)
    y = run(compiled(one(16, 16, Layer(eye), act=function)), x)
    expected = ACTIVATIONS[function](scaled.double())
    error = (y.double() - expected).abs()
    ulps, least = (2, 1e-6) if function in ("gelu", "gelu_tanh") else (16, 1e-33)
    assert (error <= ulps * 2.0**-23 * expected.abs() + least).all(), error.max()
    x[0, 0, 3] = float("nan")
    assert run(compiled(one(16, 16, Layer(eye), act=function)), x)[0, 0].isnan().all()


# -- beside the reference ----------------------------------------------------------------------------------------------

# Relative error of a whole chain. int8: a number near the middle between two codes may get the other code.
TOLERANCE = {"float": {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}, "int8": 2e-2}


def check(steps: Steps, x: torch.Tensor, tolerance: float, call: Call | None = None) -> None:
    y, expected = run(compiled(steps), x, call), run_reference(steps, x, call or Call())
    assert y.dtype is expected.dtype
    assert y.shape == expected.shape
    assert (y.float() - expected.float()).norm() <= tolerance * expected.float().norm()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chain_with_every_option(isa: str, threads: int, dtype: torch.dtype, rows: int) -> None:
    check(whole(dtype), random(1, rows, 100, dtype=dtype), TOLERANCE["float"][dtype])
    if dtype is torch.float32:
        check(whole(dtype, "int8", k=160, f=64), random(rows, 1, 160), TOLERANCE["int8"])


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_weight(isa: str, name: str) -> None:
    check(whole(torch.float32, name=name), random(3, 3, 100), 2e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 384, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(isa: str, threads: int, kind: Any, width: int, dtype: torch.dtype) -> None:
    x = random(2, 19, width, dtype=dtype) * 3 + 5
    eps = torch.finfo(dtype).eps if dtype is not torch.float32 else 2e-6
    for p in (norm(kind, width, dtype), norm(kind, width, offset=1.0), Norm(kind, 1e-6)):
        steps = Steps((NormStep(0, 1, p),), (width, width), dtype)
        y, expected = run(compiled(steps), x), run_reference(steps, x, Call())
        assert ((y.float() - expected.float()).abs() <= 2 * eps * expected.float().abs() + 4 * eps).all()


def test_layers_of_different_kinds_in_one_step(isa: str, threads: int) -> None:
    """int4 and int8 weights, with and without quantized inputs, read one normalized input."""
    k = 96
    layers = (layer(40, k, "row", "int8"), layer(24, k, "int4"), layer(33, k, "row", "int8"), layer(17, k, "uint3"))
    for kept in (None, 6):
        head = LinearStep(0, layers, (2, 3, 4, 5), norm("layer", k), kept)
        tail = [LinearStep(i, (layer(k, n),), (1,), residual=1) for i, n in ((3, 24), (4, 33), (5, 17))]
        steps = Steps((head, LinearStep(2, (layer(k, 40),), (1,)), *tail), (k, k, 40, 24, 33, 17, k), torch.float32)
        for rows in (1, 5):
            check(steps, random(1, rows, k), 2e-2)


def test_the_input_may_be_overwritten(isa: str, threads: int) -> None:
    """A step that writes to the buffer of its input, with one row (which threads prepare for themselves) and more."""
    k = 640
    w = layer(k, k)
    steps = Steps((LinearStep(0, (w,), (2,)), LinearStep(2, (w,), (2,), residual=2), NormStep(2, 1, Norm("rms", 1e-6))),
                  (k, k, k), torch.float32)  # fmt: skip
    for rows in (1, 2, 5):
        check(steps, random(1, rows, k), 1e-5)


def test_a_block_in_two_parts(isa: str) -> None:
    """Buffers that the call keeps."""
    first = LinearStep(0, (layer(40, 64), layer(24, 64)), (2, 3), norm("rms", 64))
    second = (LinearStep(2, (layer(24, 40),), (4,), act="silu", residual=3), LinearStep(4, (layer(64, 24),), (1,)))
    widths, x = (64, 64, 40, 24, 24), random(1, 6, 64)
    expected = run(compiled(Steps((first, *second), widths, torch.float32)), x)
    kept = {2: torch.empty(6, 40), 3: torch.empty(6, 24)}
    store = NormStep(0, 1, Norm("rms", 1e-6))  # a block has an output
    run(compiled(Steps((first, store), widths, torch.float32)), x, Call(kept=kept))
    part = compiled(Steps(second, widths, torch.float32))
    assert torch.equal(run(part, x, Call(kept=kept)), expected)
    with pytest.raises(ArgumentError, match="keep them"):
        part.run(x, Call())
    with pytest.raises(ArgumentError, match=r"kept buffer 3.*144"):
        part.run(x, Call(kept={**kept, 3: torch.empty(5, 24)}))
    with pytest.raises(ArgumentError, match="cannot keep buffer 1"):
        part.run(x, Call(kept={**kept, 1: torch.empty(6, 64)}))


def test_static_inputs() -> None:
    w = layer(48, 96, "row", "static")
    check(one(48, 96, w), random(1, 5, 96), 1e-6)
    w.weight.act_scale.fill_(0.07)  # changes in place are seen
    check(one(48, 96, w), random(1, 5, 96), 1e-6)


def test_many_rows_use_little_memory_twice() -> None:
    """More token blocks than one unit has, and columns beyond one chunk."""
    check(whole(torch.float32), random(9, 200, 100), 1e-5)
    wide = Steps((LinearStep(0, (layer(32, 4500, "int4"),), (1,)),), (4500, 32), torch.float32)
    check(wide, random(1, 70, 4500), 1e-5)


def test_empty_inputs() -> None:
    assert run(compiled(whole(torch.float32)), torch.empty(0, 5, 100)).shape == (0, 5, 100)


ASYMMETRIC_STATIC = ActivationSpec(QuantSpec(INT8, None, zero_point=True), "static")


def test_static_inputs_with_a_zero_point() -> None:
    w = make("row", (48, 96), torch.float32, ASYMMETRIC_STATIC)
    w = w.with_(act_scale=torch.tensor([0.04]), act_zero_point=torch.tensor([5], dtype=torch.int8)).to_layout("cpu")
    check(one(48, 96, Layer(w)), random(1, 5, 96), 1e-6)


# -- arguments of native code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.layers[0].weight._codes.resize_(1),
        lambda s: s.layers[0].weight._scale.resize_(1),
        lambda s: s.layers[0].weight._codes.untyped_storage().resize_(0),
        lambda s: setattr(s.layers[0].bias, "data", torch.randn(9)),
        lambda s: setattr(s.layers[0].bias, "data", torch.randn(48, dtype=torch.bfloat16)),
        lambda s: setattr(s.norm.weight, "data", torch.randn(95)),
    ],
)
def test_a_parameter_that_changed_is_refused(change: Any) -> None:
    w = layer(48, 96)
    step = LinearStep(0, (Layer(w.weight.clone(), w.bias),), (1,), norm("rms", 96))
    block, x = compiled(Steps((step,), (96, 48), torch.float32)), random(1, 3, 96)
    before = run(block, x)
    w.bias.add_(1)  # type: ignore[union-attr]  # changes in place are seen
    assert torch.allclose(run(block, x), before + 1, atol=1e-5)
    change(step)
    with pytest.raises(ArgumentError):
        block.run(x, Call())


def test_calls_that_others_must_see_are_left_to_the_caller() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    block, x = compiled(one(48, 96, layer(48, 96))), random(1, 3, 96)
    assert block.run(x.double(), Call()) is None
    assert block.run(x.to("meta"), Call()) is None
    assert block.run(torch._neg_view(x), Call()) is None
    assert block.run(x.clone().requires_grad_(), Call()) is None
    with torch.no_grad():
        assert block.run(x.clone().requires_grad_(), Call()) is not None
    with FakeTensorMode():
        assert block.run(torch.empty(1, 3, 96), Call()) is None
    with FlopCounterMode(display=False):
        assert block.run(x, Call()) is None
    seen = []
    torch.func.vmap(lambda x: seen.append(block.run(x, Call())) or x)(x[None])
    assert seen == [None]
    assert torch.equal(run(block, x.transpose(0, 1).contiguous().transpose(0, 1)), run(block, x))


def test_reasons() -> None:
    """What the native library cannot run, with the reason; steps that contradict themselves are errors."""
    float_weight = compile_steps(one(8, 16, Layer(torch.zeros(8, 16))))
    assert isinstance(float_weight, str)
    assert "step 0 (LinearStep): needs a quantized weight" in float_weight
    w = make("row", (8, 16), torch.float32)
    assert "layout" in str(compile_steps(one(8, 16, Layer(w))))
    order = w.to_layout("cpu").with_(perm=torch.arange(16, dtype=torch.int32))
    assert "not permuted" in str(compile_steps(one(8, 16, Layer(order))))
    packed = layer(8, 16)
    assert "float64" in str(compile_steps(one(8, 16, packed, torch.float64)))
    half = LinearStep(0, (layer(40, 16),), (1,), gated=True)
    assert "whole tiles" in str(compile_steps(Steps((half,), (16, 20), torch.float32)))
    mixed = LinearStep(0, (layer(8, 16), layer(8, 16, "int4")), (1,), gated=True)
    assert "alike" in str(compile_steps(Steps((mixed,), (16, 8), torch.float32)))
    wrong = {
        "a weight": (LinearStep(0, (layer(8, 15),), (1,)),), "outputs of": (LinearStep(0, (layer(9, 16),), (1,)),),
        "a residual of": (LinearStep(0, (packed,), (1,), residual=0),),
        "same size": (LinearStep(0, (packed,) * 3, (1,), gated=True),),
        "there are": (LinearStep(0, (packed,), (2,)),), "writes to the input": (NormStep(0, 0, Norm("rms", 0.1)),),
        "writes the output": (), "of the norm": (LinearStep(0, (packed,), (1,), norm("rms", 15)),),
        "before it is written": (NormStep(1, 1, Norm("rms", 0.1)),),
    }  # fmt: skip
    for message, steps in wrong.items():
        with pytest.raises(ArgumentError, match=message if steps else "needs steps"):
            compile_steps(Steps(steps, (16, 8), torch.float32))
