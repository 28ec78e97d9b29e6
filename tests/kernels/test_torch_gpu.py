"""Rows of torch's GPU ops, without a GPU: packing, orientation and padding against a reference of each op, limits
against torch's fake functions and the stricter rules of the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pennyweight.core.formats import E2M1, E4M3, E5M2, INT4, INT7, INT8
from pennyweight.core.layouts import get_layout
from pennyweight.core.numerics import quantize
from pennyweight.core.spec import (
    FP8_BLOCK,
    FP8_ROW,
    FP8_TENSOR,
    INT8_ROW,
    INT8_ROW_ASYMMETRIC,
    MXFP4,
    MXFP8,
    NVFP4,
    TINYGEMM,
    ActivationSpec,
    QuantSpec,
)
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import gpu_arguments, torch_gpu
from pennyweight.kernels.activation import quantize_activation
from pennyweight.kernels.table import Case, get_kernel
from pennyweight.kernels.target import assume_target, fits
from pennyweight.kernels.torch_gpu import LIMITS
from pennyweight.kernels.torch_gpu_layouts import int4_codes, int4_words, tiled_scales, untiled_scales
from pennyweight.support.errors import ArgumentError

from . import torch_gpu_ops as ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E5M2_ROW = QuantSpec(E5M2, (-1,))
INT8_TENSOR, INT7_ROW = QuantSpec(INT8, None), QuantSpec(INT7, (-1,))
INT4_32, INT4_64 = (QuantSpec(INT4, (g,), scale=BF16) for g in (32, 64))
NVFP4_PLAIN = QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, (1,), scale=None))
MX_ACT = ActivationSpec(MXFP8, "dynamic", "mx_rceil")

# row, target, weight, activation, (N, K), dtypes
CASES: list[tuple[str, str, QuantSpec, ActivationSpec | None, tuple[int, int], tuple[torch.dtype, ...]]] = [
    ("torch_scaled_mm", "cuda:sm_90", FP8_TENSOR, ActivationSpec(FP8_TENSOR), (48, 64), (BF16, F16, F32)),
    ("torch_scaled_mm", "cuda:sm_90", FP8_ROW, ActivationSpec(FP8_ROW), (48, 64), (BF16,)),
    ("torch_scaled_mm", "cuda:sm_90", FP8_ROW, ActivationSpec(FP8_TENSOR), (16, 16), (BF16,)),
    ("torch_scaled_mm", "cuda:sm_90", FP8_TENSOR, ActivationSpec(E5M2_ROW), (32, 48), (BF16,)),
    ("torch_scaled_mm", "cuda:sm_90", FP8_ROW, ActivationSpec(FP8_TENSOR, "static"), (48, 64), (BF16,)),
    ("torch_scaled_mm", "cuda:sm_120", FP8_TENSOR, ActivationSpec(FP8_TENSOR, "static"), (48, 64), (BF16, F16, F32)),
    ("torch_scaled_mm_blocks", "cuda:sm_100", MXFP8, MX_ACT, (48, 96), (BF16,)),
    ("torch_scaled_mm_blocks", "cuda:sm_100", MXFP8, MX_ACT, (144, 160), (BF16,)),
    ("torch_scaled_mm_blocks", "cuda:sm_100", NVFP4, ActivationSpec(NVFP4), (144, 160), (BF16,)),
    ("torch_scaled_mm_blocks", "cuda:sm_100", NVFP4_PLAIN, ActivationSpec(NVFP4_PLAIN), (48, 32), (BF16,)),
    ("torch_scaled_mm_blocks", "cuda:sm_100", NVFP4, ActivationSpec(NVFP4, "static"), (48, 64), (BF16,)),
    ("torch_int_mm_gpu", "cuda:sm_80", INT8_ROW, ActivationSpec(INT8_ROW), (24, 40), (BF16, F16, F32)),
    ("torch_int_mm_gpu", "hip:gfx942", INT7_ROW, ActivationSpec(INT8_TENSOR), (8, 8), (BF16, F32)),
    ("torch_int_mm_gpu", "cuda:sm_90", INT8_TENSOR, ActivationSpec(INT8_TENSOR, "static"), (24, 40), (BF16,)),
    ("torch_int4pack_gpu", "cuda:sm_80", TINYGEMM, None, (24, 256), (BF16,)),
    ("torch_int4pack_gpu", "cuda:sm_90", INT4_32, None, (8, 100), (BF16,)),  # columns padded to 128
    ("torch_int4pack_gpu", "cuda:sm_90", INT4_32, None, (16, 96), (BF16,)),
    ("torch_int4pack_gpu", "cuda:sm_100", INT4_64, None, (8, 64), (BF16,)),
]  # fmt: skip
IDS = [f"{c[0]} {c[2]} {c[3]} {c[4]}" for c in CASES]


@pytest.fixture
def torch_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's ops replaced by their references."""
    for owner, name, reference in ops.OPS:
        monkeypatch.setattr(owner, name, reference)
    packed = torch.ops.aten._weight_int4pack_mm
    monkeypatch.setattr(packed, "default", ops.weight_int4pack_mm)
    return


def weight(
    spec: QuantSpec, act: ActivationSpec | None, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> QT:
    numbers = torch.randn(shape, device=device)
    if device == "cpu":
        numbers = numbers * torch.logspace(-1, 1, shape[-2])[:, None]
    w = QT.from_float(numbers.to(dtype), spec, "mx_rceil" if act is MX_ACT else None, act=act)
    if act is not None and act.mode == "static":
        w = w.with_(act_scale=torch.tensor([0.03 if act.spec.format is not E2M1 else 2.0**-11], device=device))
    return w


def case(w: QT, target: str, dtype: torch.dtype) -> Case:
    return Case(w.spec.with_(layout="plain"), w.act, tuple(w.stored_shape), dtype, target)


@pytest.mark.parametrize(("name", "target", "spec", "act", "shape", "dtypes"), CASES, ids=IDS)
def test_a_row_gives_the_product_of_the_values(
    name: str, target: str, spec: QuantSpec, act: Any, shape: Any, dtypes: Any, torch_ops: None
) -> None:
    for dtype in dtypes:
        w = weight(spec, act, shape, dtype)
        kernel = get_kernel("linear", name)
        assert kernel.refuses(case(w, target, dtype), any_layout=True) is None
        packed = w.to_layout(kernel.layout or "plain")
        for lead in ((1,), (5,), (2, 17), (0,), ()):
            for bias in (None, torch.randn(shape[0]).to(dtype), torch.randn(shape[0])):
                x = torch.randn(*lead, shape[1]).to(dtype)
                before = x.clone()
                y = kernel.run(x, packed, bias)
                assert (y.shape, y.dtype) == ((*lead, shape[0]), dtype)
                assert torch.equal(x, before)
                if x.numel():
                    check(y, x, w, bias, dtype)


def check(y: Tensor, x: Tensor, w: QT, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Within a few roundings of the result to its dtype, of what the sums would be without cancellation."""
    seen = quantize_activation(x.float() if w.act else x, w.act, w.act_scale, w.act_zero_point).double()
    if w.act is not None and w.act.mode == "dynamic":  # scales are chosen from the input's own dtype
        seen = quantize_activation(x, w.act, None, None).double() if dtype is F32 else exact(x, w.act)
    values = w.dequantize(torch.float64)
    wanted, limit = F.linear(seen, values), F.linear(seen.abs(), values.abs())
    if bias is not None:
        wanted, limit = wanted + bias.double(), limit + bias.double().abs()
    unit = torch.finfo(BF16 if dtype is BF16 else dtype).eps
    assert ((y.double() - wanted).abs() <= 4 * unit * limit + 1e-6).all()


def exact(x: Tensor, act: ActivationSpec) -> Tensor:
    """The input as quantized from its own dtype, without rounding the values back to it."""
    from pennyweight.core.numerics import dequantize

    return dequantize(quantize(x, act.spec, act.rule, act.eps), act.spec, x.shape, torch.float64)


@pytest.mark.parametrize(("name", "target", "spec", "act", "shape", "dtypes"), CASES, ids=IDS)
def test_packing_is_undone_bit_for_bit(
    name: str, target: str, spec: QuantSpec, act: Any, shape: Any, dtypes: Any
) -> None:
    w = weight(spec, act, shape, dtypes[0])
    layout = get_kernel("linear", name).layout or "plain"
    packed = w.to_layout(layout)
    for back in (packed.to_layout("plain"), w.to_layout("bits").to_layout(layout).to_layout("plain")):
        assert torch.equal(bits(back.codes), bits(w.codes))
        assert torch.equal(values(back.scale), values(w.scale))
    assert torch.equal(packed.dequantize(), w.dequantize())
    stored = sum(p.nbytes for p in packed.parts if p is not None) - (4 if w.act_scale is not None else 0)
    assert stored == get_layout(layout).nbytes(spec, shape)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def values(t: Any) -> Tensor:
    return t.dequantize() if isinstance(t, QT) else t


@pytest.mark.parametrize(("n", "k", "inner"), [(16, 256, 8), (8, 192, 4), (24, 96, 2)])
def test_int4_words_are_those_of_a_lane(n: int, k: int, inner: int) -> None:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    words = int4_words(codes)
    assert torch.equal(words, ops.int4_words(codes, inner))
    assert words.is_contiguous()
    assert torch.equal(int4_codes(words, n, k), codes)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (128, 4), (130, 5), (48, 12), (300, 2)])
def test_tiles_of_scales(rows: int, columns: int) -> None:
    scales = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    flat = tiled_scales(scales)
    assert torch.equal(untiled_scales(flat, rows, columns), scales)
    by_formula = ops.untiled(flat.view(torch.float8_e8m0fnu), rows, columns)
    assert torch.equal(by_formula, 2.0 ** (scales.double() - 127))


def test_codes_of_fp4_are_those_of_the_hardware() -> None:
    values = ops.E2M1[[i for i in range(16) if i != 8]].float()  # without -0, which no code of ours is
    assert torch.equal(E2M1.decode(E2M1.encode(values)), values)
    assert torch.equal(ops.E2M1[E2M1.to_unsigned(E2M1.encode(values)).long()].float(), values)


# -- experts -----------------------------------------------------------------------------------------------------------


def test_experts(torch_ops: None) -> None:
    act = ActivationSpec(FP8_ROW)
    w = weight(FP8_ROW, act, (3, 32, 48), BF16)
    found = case(w, "cuda:sm_90", BF16)
    kernel = get_kernel("bmm", "torch_scaled_grouped_mm")
    assert kernel.refuses(found, any_layout=True) is None
    for target in ("cuda:sm_80", "cuda:sm_89", "cuda:sm_120", "hip:gfx942", "mps"):
        assert "only" in str(kernel.refuses(replace(found, device=target), any_layout=True))
    x = torch.randn(3, 5, 48).to(BF16)
    y = kernel.run(x, w, None)
    for e in range(3):
        check(y[e], x[e], expert(w, e), None, BF16)
    flat, ends = torch.randn(12, 48).to(BF16), torch.tensor([2, 2, 9], dtype=torch.int32)
    y = torch_gpu.experts_grouped_mm(flat, w, ends)
    check(y[:2], flat[:2], expert(w, 0), None, BF16)
    check(y[2:9], flat[2:9], expert(w, 2), None, BF16)
    assert not y[9:].any(), "rows of no expert are zeros, and the op does not write them"
    assert torch_gpu.experts_grouped_mm(flat[:0], w, ends * 0).shape == (0, 32)


def expert(w: QT, e: int) -> QT:
    return QT.from_float(w.dequantize()[e], FP8_ROW, act=w.act).with_(codes=w.codes[e], scale=w.scale[e])


# -- refusals ----------------------------------------------------------------------------------------------------------

TARGETS = ("cpu", "cuda", "cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx942", "mps")
SPECS = (
    FP8_TENSOR, FP8_ROW, E5M2_ROW, FP8_BLOCK, INT8_ROW, INT8_TENSOR, INT8_ROW_ASYMMETRIC, MXFP8, MXFP4, NVFP4, TINYGEMM,
    INT4_32, INT4_64, QuantSpec(INT4, (16,), scale=BF16), QuantSpec(INT4, (32,)),
)  # fmt: skip
ACTS = (
    None, ActivationSpec(FP8_TENSOR), ActivationSpec(FP8_ROW), ActivationSpec(E5M2_ROW), ActivationSpec(INT8_ROW),
    ActivationSpec(INT8_ROW_ASYMMETRIC), MX_ACT, ActivationSpec(NVFP4), ActivationSpec(FP8_TENSOR, "static"),
    ActivationSpec(QuantSpec(E4M3, (32,))),
)  # fmt: skip
SHAPES = ((16, 16), (16, 8), (8, 16), (24, 64), (12, 64), (16, 100), (48, 96), (16, 160), (16, 256), (3, 32))
ROWS = ("torch_scaled_mm", "torch_scaled_mm_blocks", "torch_int_mm_gpu", "torch_int4pack_gpu")


@pytest.mark.parametrize("name", ROWS)
def test_what_a_row_accepts_the_fake_function_of_its_op_takes(name: str, fake_cuda: None) -> None:
    """The fake functions see everything but the device: strides, sizes, dtypes of parts and scales."""
    kernel, count = get_kernel("linear", name), 0
    for spec in SPECS:
        for act in ACTS:
            for shape in SHAPES:
                for dtype in (BF16, F16, F32, torch.float64):
                    where = [
                        t for t in TARGETS if kernel.refuses(Case(spec, act, shape, dtype, t), any_layout=True) is None
                    ]
                    assert all(fits(kernel.devices, t) for t in where)
                    if not where:
                        continue
                    count += 1
                    with assume_target(where[0]), FakeTensorMode():
                        w = weight(spec, act, shape, dtype, "cuda:0").to_layout(kernel.layout or "plain")
                        for m in (1, 16, 17, 40):
                            x = torch.empty(m, shape[1], dtype=dtype, device="cuda:0")
                            y = kernel.run(x, w, torch.empty(shape[0], dtype=dtype, device="cuda:0"))
                            assert (y.shape, y.dtype, str(y.device)) == ((m, shape[0]), dtype, "cuda:0")
    assert count > 3, "the sweep reaches the row"


@pytest.mark.parametrize(
    ("limits", "target", "dtype", "shape", "words"),
    [
        ("tensor", "cuda:sm_80", BF16, (16, 16), "runs on cuda:sm_89+ only, this is cuda:sm_80"),
        ("tensor", "cuda", BF16, (16, 16), "only, this is cuda"),  # of unknown capability
        ("tensor", "hip:gfx942", BF16, (16, 16), "only"),  # its float8 has another bias
        ("tensor", "cuda:sm_90", torch.float64, (16, 16), "the input is float64"),
        ("tensor", "cuda:sm_90", BF16, (24, 16), "N to be a multiple of 16, N is 24"),
        ("tensor", "cuda:sm_90", BF16, (16, 24), "K to be a multiple of 16, K is 24"),
        ("tensor", "cuda:sm_90", BF16, (16, 0), "K is 0"),
        ("rows", "cuda:sm_90", F16, (16, 16), "gives bfloat16 results, the input is float16"),
        ("mx", "cuda:sm_90", BF16, (16, 32), "cuda:sm_100+ only"),
        ("mx", "cuda:sm_100", BF16, (16, 48), "K to be a multiple of 32"),
        ("nvfp4", "cuda:sm_100", F32, (16, 32), "gives bfloat16 results"),
        ("int8", "mps", BF16, (8, 8), "runs on cuda, hip only"),
        ("int8", "cuda:sm_80", BF16, (12, 8), "N to be a multiple of 8"),
        ("int8", "cuda:sm_80", BF16, (8, 131072), "may overflow int32"),
        ("int4", "cuda:sm_75", BF16, (8, 32), "cuda:sm_80+ only"),
        ("int4", "cuda:sm_80", F16, (8, 32), "the input is float16"),
        ("experts", "cuda:sm_120", BF16, (16, 16), "runs on cuda:sm_90, cuda:sm_100 only"),
    ],
)
def test_limits_say_why(limits: str, target: str, dtype: torch.dtype, shape: tuple[int, int], words: str) -> None:
    said = LIMITS[limits].refuses(target, dtype, shape)
    assert words in str(said)


def test_limits_that_callers_pad_for() -> None:
    assert LIMITS["int8"].refuses("cuda:sm_80", BF16) is None
    assert LIMITS["tensor"].refuses("cuda:sm_90", F32) is None


@pytest.mark.parametrize(("version", "refused"), [((2, 11), True), ((2, 12), False), ((2, 13), False)])
def test_row_scales_on_ada_need_a_torch_that_launches_on_the_right_stream(
    version: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_gpu, "_TORCH", version)
    said = LIMITS["rows"].refuses("cuda:sm_89", BF16, (16, 16))
    assert (said is not None and "another stream" in said and "before torch 2.12" in said) == refused
    assert LIMITS["rows"].refuses("cuda:sm_90", BF16, (16, 16)) is None
    assert LIMITS["tensor"].refuses("cuda:sm_89", BF16, (16, 16)) is None


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
def test_limits_are_at_least_those_of_the_device(limits: torch_gpu.Limits) -> None:
    """Read from libtorch_cuda: what it checks beyond the fake functions."""
    assert limits.k % 8 == 0
    assert limits.n % 8 == 0
    if "_scaled" in limits.op:
        assert limits.n % 16 == limits.k % 16 == 0
        assert not fits(limits.devices, "cuda:sm_80")
        assert not fits(limits.devices, "cuda")
    if "grouped" in limits.op:
        assert [t for t in TARGETS if fits(limits.devices, t)] == ["cuda:sm_90", "cuda:sm_100"]
    if "int4pack" in limits.op:
        assert limits.outputs == (BF16,)
        assert not fits(limits.devices, "hip:gfx942")


@pytest.mark.parametrize(
    ("name", "spec", "act", "shape", "words"),
    [
        ("torch_int_mm_gpu", INT8_ROW, None, (16, 16), "weight-only"),
        ("torch_int_mm_gpu", INT8_ROW, ActivationSpec(INT8_ROW_ASYMMETRIC), (16, 16), "symmetric int8"),
        ("torch_int_mm_gpu", QuantSpec(INT8, (8,)), ActivationSpec(INT8_ROW), (16, 16), "one scale per row"),
        ("torch_scaled_mm", FP8_BLOCK, ActivationSpec(FP8_ROW), (128, 128), "one scale per row or per tensor"),
        ("torch_scaled_mm", E5M2_ROW, ActivationSpec(E5M2_ROW), (16, 16), "one side must be e4m3"),
        ("torch_scaled_mm", MXFP8, MX_ACT, (16, 32), "plain scales"),
        ("torch_scaled_mm_blocks", MXFP4, ActivationSpec(MXFP4), (16, 32), "MX"),
        ("torch_scaled_mm_blocks", MXFP8, ActivationSpec(NVFP4), (16, 32), "needs mx activations"),
        ("torch_scaled_mm_blocks", NVFP4, ActivationSpec(NVFP4), (16, 48), "K to be a multiple of 32"),
        ("torch_int4pack_gpu", TINYGEMM, ActivationSpec(INT8_ROW), (16, 256), "activation is quantized"),
        ("torch_int4pack_gpu", QuantSpec(INT4, (32,)), None, (16, 64), "bfloat16 scales"),
        ("torch_int4pack_gpu", QuantSpec(INT4, (16,), scale=BF16), None, (16, 64), "groups of"),
        ("torch_int4pack_gpu", INT4_32, None, (12, 64), "N to be a multiple of 8"),
    ],
)
def test_rows_say_why(name: str, spec: QuantSpec, act: Any, shape: tuple[int, int], words: str) -> None:
    said = get_kernel("linear", name).refuses(Case(spec, act, shape, BF16, "cuda:sm_100"), any_layout=True)
    assert words in str(said)


# -- arguments ---------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_the_gate_passes_what_a_kernel_may_read() -> None:
    t = torch.arange(64, dtype=torch.int8)
    assert gpu_arguments.aligned(t, "codes", torch.int8, (64,), CPU) is t
    assert gpu_arguments.aligned(t, "codes", (torch.uint8, torch.int8), (None,), CPU) is t


@pytest.mark.parametrize("make", [lambda t: t[1:17], lambda t: t.view(4, 16)[:, :4].reshape(4, 4).t()[:, :4]])
def test_the_gate_copies_what_is_only_badly_placed(make: Any) -> None:
    t = make(torch.arange(64, dtype=torch.int8))
    got = gpu_arguments.aligned(t, "codes", torch.int8, t.shape, CPU)
    assert torch.equal(got, t)
    assert got.data_ptr() % 16 == 0
    assert got.is_contiguous()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, 8, dtype=torch.int16), ("expected [4, 8] int8 on cpu", "got [4, 8] int16 on cpu")),
        (torch.zeros(4, 7, dtype=torch.int8), ("got [4, 7]", "resized or replaced")),
        (torch.zeros(4, 8, dtype=torch.int8, device="meta"), ("on meta", "codes.to('cpu')")),
        (torch.zeros(4, 8, dtype=torch.int8).to_sparse(), ("got [4, 8]",)), (None, ("missing, expected [4, 8] int8",)),
    ],
)  # fmt: skip
def test_the_gate_names_what_was_expected(tensor: Any, words: tuple[str, ...]) -> None:
    class Layer(torch.nn.Module):
        def forward(self) -> Tensor:
            return gpu_arguments.aligned(tensor, "codes", torch.int8, (4, 8), CPU)

    with pytest.raises(ArgumentError) as error:
        torch.nn.Sequential(torch.nn.Identity(), Layer())[1]()
    assert all(word in str(error.value) for word in ("codes in Layer", *words)), error.value


def test_the_gate_counts_elements_before_32_bit_offsets_overflow() -> None:
    huge = torch.empty(1, dtype=torch.int8).expand(1 << 16, 1 << 15)
    with pytest.raises(ArgumentError, match=r"fewer than 2\*\*31 elements"):
        gpu_arguments.aligned(huge, "codes", torch.int8, huge.shape, CPU)


def test_inputs_and_biases() -> None:
    x = torch.randn(2, 3, 8)
    assert gpu_arguments.rows(x, 8, (F32,), CPU).shape == (6, 8)
    assert gpu_arguments.vector(None, "bias", 4, (F32,), CPU) is None
    with pytest.raises(ArgumentError, match="the last axis of the input must be 16"):
        gpu_arguments.rows(x, 16, (F32,), CPU)
    with pytest.raises(ArgumentError, match="bias: expected"):
        gpu_arguments.vector(torch.randn(5), "bias", 4, (F32,), CPU)


def test_the_arguments_of_linear() -> None:
    x, bias, order = torch.randn(2, 3, 8), torch.randn(4), torch.randperm(8)

    def given(x: Any, bias: Any = None, perm: Any = None) -> Any:
        return gpu_arguments.linear_arguments(x, bias, 4, 8, F32, CPU, perm)

    assert given(x, bias)[0] is x
    assert given(x, bias)[1] is bias
    assert torch.equal(given(x, None, order)[0], x[..., order])
    strided, unaligned = torch.randn(3, 16)[:, ::2], torch.randn(25)[1:].view(3, 8)
    for placed in (strided, unaligned):
        got = given(placed)[0]
        assert torch.equal(got, placed)
        assert gpu_arguments.readable(got)
    got = given(x, torch.randn(5)[1:])[1]
    assert gpu_arguments.readable(got)
    wrong = (x.double(), x[..., :4], torch.tensor(1.0), x.to("meta"), torch._neg_view(x), x.to_sparse())
    assert [given(t) for t in wrong] == [None] * len(wrong)
    wrong = (bias[:3], bias.long(), bias.to("meta"), torch._neg_view(bias), bias[None])
    assert [given(x, t) for t in wrong] == [None] * len(wrong)
    with FakeTensorMode():
        assert given(x) is None


def test_kernels_run_on_the_device_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            seen.append(self.index)

        def __exit__(self, *error: object) -> None:
            seen.append(-1)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    run = lambda *args: sum(args)  # noqa: E731
    assert gpu_arguments.on_device(run, CPU) is run, "no cost on a CPU"
    assert gpu_arguments.on_device(run, torch.device("cuda:0"))(1, 2) == 3
    assert seen == []
    assert gpu_arguments.on_device(run, torch.device("cuda:1"))(1, 2) == 3
    assert seen == [1, -1]
