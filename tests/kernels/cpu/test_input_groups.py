"""Inputs quantized per group of columns by the native integer linear: the codes, and which cases run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core.formats import INT7, INT8, UINT7, get_format
from pennyweight.core.numerics import Parts, fake_quantize, quantize
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import library
from pennyweight.kernels.cpu.int_linear import describe
from pennyweight.kernels.table import Case, case_of, explain, select
from tests.kernels.cpu.test_int_linear import isa  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COLUMNS = 200  # six groups of 32 and a short one; three of 64 and a short one


def groups(size: int, fmt: Any = INT8, rule: str | None = None, eps: float | None = None, **parts: Any) -> Any:
    return ActivationSpec(QuantSpec(fmt, (size,), **parts), "dynamic", rule, eps)


ACTS = {
    "32": groups(32),
    "64, absmax": groups(64, rule="absmax", eps=1e-5),
    "96, 7 bits": groups(96, INT7),
    "32, bf16 scales": groups(32, scale=torch.bfloat16),
    "64, f16 scales": groups(64, scale=torch.float16, zero_point=True),
    "32, asymmetric": groups(32, zero_point=True),
    "128, unsigned": groups(128, UINT7, zero_point=True),
    "one group": groups(256),
}


def identity(n: int, act: ActivationSpec, dtype: torch.dtype) -> QT:
    """A weight that returns its quantized input: codes 0 and 1, scale 1."""
    spec = QuantSpec(INT8, (-1,))
    parts = Parts(torch.eye(n, dtype=torch.int8), torch.ones(n, 1))
    return QT(parts, spec, (n, n), dtype, act).to_layout("cpu")


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Columns of very different size, groups of zeros, of one sign, constant, subnormal and large ones."""
    x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(3))
    x *= torch.logspace(-3, 3, COLUMNS)
    x[1] = 0
    x[2, :64] = 0
    x[3] = x[3].abs()
    x[4] = -0.7
    x[5] = 1000 + 0.001 * x[5]
    x = x.to(dtype)
    x[6] = torch.finfo(dtype).smallest_normal / 4
    x[7] = torch.finfo(dtype).max / 2
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTS)
def test_codes_and_scales_are_those_of_the_reference(isa: str, act: str, dtype: torch.dtype) -> None:  # noqa: F811
    w, x = identity(COLUMNS, ACTS[act], dtype), rows(dtype)
    assert select("linear", case_of(w, dtype)).name == "cpu_int"
    expected = fake_quantize(x, ACTS[act].spec, ACTS[act].rule, ACTS[act].eps)
    for m in (9, 3, 1):
        assert torch.equal(F.linear(x[:m], w), expected[:m])


def test_one_outlier_costs_its_group_only(isa: str) -> None:  # noqa: F811
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    x[:, 70] = 500
    error = {g: (F.linear(x, identity(128, groups(g), x.dtype)) - x).abs().amax(0) for g in (128, 32)}
    assert error[128][:64].max() > 0.5
    assert error[32][:64].max() < 0.02
    assert error[32][96:].max() < 0.02
    assert error[32][64:96].max() > 0.5


def test_a_nan_spoils_its_row_only(isa: str) -> None:  # noqa: F811
    weight = torch.randn(37, 100)
    for act in (groups(32), groups(64, zero_point=True)):
        w = QT.from_float(weight, QuantSpec(INT8, (-1,)), act=act).to_layout("cpu")
        x = torch.randn(4, 100)
        good = F.linear(x, w)
        for column in (0, 50, 99):
            bad = x.clone()
            bad[1, column], bad[3, column] = float("nan"), float("inf")
            y = F.linear(bad, w)
            assert y[1].isnan().all()
            assert y[3].isnan().all()
            assert torch.equal(y[::2], good[::2])


def test_groups_not_smaller_than_the_input_are_rows_to_the_bit(isa: str) -> None:  # noqa: F811
    w, x = QT.from_float(torch.randn(37, 100), QuantSpec(INT8, (-1,)), act=groups(-1)), torch.randn(5, 100)
    expected = F.linear(x, w.to_layout("cpu"))
    for size in (100, 101, 128):
        assert torch.equal(F.linear(x, w.with_(act=groups(size)).to_layout("cpu")), expected)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (groups(48), "needs groups of input columns that are multiples of 32, not 48"),
        (groups(16), "needs groups of input columns that are multiples of 32, not 16"),
        (ActivationSpec(QuantSpec(INT8, (2, 32))), "needs one activation scale per token, or per group of columns"),
        (ActivationSpec(QuantSpec(INT8, None)), "needs one activation scale per token, or per group of columns"),
        (groups(32, rule="absmean"), "does not support activations with the rule 'absmean'"),
    ],
)
def test_what_it_refuses_runs_elsewhere(act: ActivationSpec, reason: str) -> None:
    w, x = QT.from_float(torch.randn(24, 96), QuantSpec(INT8, (-1,)), act=act), torch.randn(6, 96)
    assert reason in str(explain(x, w))
    assert select("linear", case_of(w, x.dtype)).name != "cpu_int"
    told = fake_quantize(x, act.spec, act.rule, act.eps) @ w.dequantize().t()
    torch.testing.assert_close(F.linear(x, w), told, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("weight", ["row", "groups of 96", "groups of 64 with offsets"])
def test_blocks_of_a_sum_divide_both_groups(weight: str) -> None:
    spec = {
        "row": QuantSpec(INT8, (-1,)),
        "groups of 96": QuantSpec(get_format("int4"), (96,)),
        "groups of 64 with offsets": QuantSpec(get_format("uint4"), (64,), offset=torch.float32, mid=8),
    }[weight]
    for size in (32, 64, 96, 128, 192, 4096):
        for act in (groups(size), groups(size, zero_point=True)):
            w = describe(Case(spec, act, (16, 8192), torch.float32, "cpu", False))
            assert w.act_group == size
            assert size % w.block == 0
            assert w.group <= 0 or w.group % w.block == 0
            assert w.block <= (512 if act.spec.zero_point else 2048)


def test_gradients_pass_through_the_rounding() -> None:
    w = QT.from_float(torch.randn(20, 100), QuantSpec(INT8, (-1,)), act=groups(32)).to_layout("cpu")
    x = torch.randn(3, 100, requires_grad=True)
    F.linear(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.dequantize().sum(0).expand(3, 100))


def test_the_scale_of_a_group_is_its_greatest_number() -> None:
    """The reference itself, which the native codes equal."""
    x = torch.tensor([[1.0] * 32 + [100.0] * 8])
    parts = quantize(x, groups(32).spec)
    assert torch.equal(parts.scale, torch.tensor([[1.0, 100.0]]) / 127.5)
    assert parts.codes.shape == (1, 64)
