"""Products with weights whose contracted axis is stored in another order: as of the same kernel on a gathered input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import E2M1, INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.inference import fused_linear
from pennyweight.inference.freeze import freeze_
from pennyweight.kernels.linear import linear
from pennyweight.kernels.repack import prepare
from pennyweight.kernels.table import case_of, explain, select
from tests.tensors import INT8_STATIC, INT8_TOKEN, SPECS, UINT8_TOKEN

WEIGHTS = {
    "int4": (SPECS["int4_group"], None),
    "uint4 asymmetric": (SPECS["uint4_perm"], None),
    "tinygemm": (SPECS["tinygemm"], None),
    "int8": (QuantSpec(INT8, (-1,)), None),
    "nf4": (SPECS["nf4_perm"], None),
    "nf4 double": (SPECS["nf4_double"], None),
    "mxfp4": (QuantSpec(E2M1, (32,)), None),
    "int8, int8 tokens": (QuantSpec(INT8, (-1,)), INT8_TOKEN),
    "int4, int8 tokens": (SPECS["int4_group"], INT8_TOKEN),
    "int4, uint8 tokens": (SPECS["int4_group"], UINT8_TOKEN),
    "int8, static": (QuantSpec(INT8, (-1,)), INT8_STATIC),
}
LAYOUTS: dict[str, Callable[[QT], QT]] = {
    "prepared": prepare, "plain": lambda w: w, "bits": lambda w: w.to_layout("bits"),
}  # fmt: skip
IN_GROUPS = ActivationSpec(QuantSpec(INT8, (32,)))


def weights(name: str, shape: tuple[int, ...] = (32, 96), dtype: torch.dtype = torch.float32) -> tuple[QT, QT]:
    """(a weight in another order, its parts as a weight in their own order)."""
    spec, act = WEIGHTS[name]
    w = QT.from_float(torch.randn(shape).to(dtype), spec, act=act)
    if act is not None and act.mode == "static":
        w = w.with_(act_scale=torch.tensor([0.03]))
    return w.with_(perm=torch.randperm(shape[-1]).to(torch.int32)), w


def agree(mine: torch.Tensor, theirs: torch.Tensor, w: QT, op: str = "linear") -> bool:
    """Equal bits where a kernel runs on a gathered input; where the weight is dequantized, sums of another order."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if select(op, case_of(w)).rank >= 0:
        return torch.equal(mine, theirs)
    limit = 1e-5 if mine.dtype is torch.float32 else 1e-2
    return float((mine - theirs).float().norm()) <= limit * float(theirs.float().norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_linear(name: str, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        w, inner = (LAYOUTS[layout](v) for v in weights(name, dtype=dtype))
        bias = torch.randn(32, dtype=dtype)
        assert select("linear", case_of(w)).name == select("linear", case_of(inner)).name
        for x in (
            torch.randn(3, 96),
            torch.randn(2, 5, 96),
            torch.randn(96),
            torch.randn(0, 96),
            torch.randn(96, 4).t(),
        ):
            x = x.to(dtype)
            gathered = x[..., w.perm]
            for b in (None, bias):
                y = F.linear(x, w, b)
                assert agree(y, F.linear(gathered, inner, b), w)
                assert y.shape == (*x.shape[:-1], 32)
            if x.ndim == 2:
                assert agree(x @ w.t(), gathered @ inner.t(), w)
                assert agree(torch.addmm(bias, x, w.t()), torch.addmm(bias, gathered, inner.t()), w)
                assert agree(w @ x.t(), inner @ gathered.t(), w)
        assert agree(torch.mv(w, x[0]), torch.mv(inner, x[0, w.perm]), w)
        tolerance = 1e-4 if dtype is torch.float32 and WEIGHTS[name][1] is None else 0.05
        x = torch.randn(7, 96, dtype=dtype)
        reference = x.float() @ w.dequantize(torch.float32).t()
        assert (F.linear(x, w).float() - reference).norm() / reference.norm() < max(
            tolerance, 0.01 * ("tinygemm" in name)
        )
    with pytest.raises(ValueError, match="must be 96"):
        F.linear(torch.randn(2, 95), w)


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients(name: str) -> None:
    w, _ = weights(name)
    w = prepare(w)
    x, bias = torch.randn(5, 96, requires_grad=True), torch.randn(32, requires_grad=True)
    y = F.linear(x, w, bias)
    g = torch.randn_like(y)
    dx, db = torch.autograd.grad(y, (x, bias), g)
    torch.testing.assert_close(dx, g @ w.dequantize())
    torch.testing.assert_close(db, g.sum(0))
    trained = w.detach().requires_grad_()
    (dw,) = torch.autograd.grad(F.linear(x, trained), trained, g)
    torch.testing.assert_close(dw, g.t() @ x)


@pytest.mark.parametrize("name", ["int4", "nf4", "int8, int8 tokens", "int8"])
def test_compiled(name: str) -> None:
    w, _ = weights(name)
    layer = nn.Linear(96, 32)
    layer.weight = nn.Parameter(prepare(w), requires_grad=False)
    x = torch.randn(5, 96, requires_grad=True)
    expected = layer(x)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    for model in (layer, freeze_(layer) and layer):
        torch._dynamo.reset()
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        assert torch.equal(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], dx)


def test_an_input_quantized_in_groups_is_quantized_in_its_own_order() -> None:
    """Its groups are those of the channels as they come, which the weight has put elsewhere."""
    w = QT.from_float(torch.randn(32, 96), SPECS["int8_row"], act=IN_GROUPS).with_(perm=torch.randperm(96))
    x = torch.randn(4, 96) * torch.logspace(-2, 2, 96)
    pw.reset_fallbacks()
    y = F.linear(x, w)
    assert pw.fallbacks() == {"linear/dequantize": 1}
    seen = QT.from_float(x, IN_GROUPS.spec).dequantize()
    torch.testing.assert_close(y, seen @ w.dequantize().t())
    assert "in groups of channels" in str(explain(x, w))
    frozen = nn.Linear(96, 32, bias=False)
    frozen.weight = nn.Parameter(w, requires_grad=False)
    freeze_(frozen)
    assert torch.equal(frozen(x), y)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(frozen, fullgraph=True, backend="aot_eager")(x), y)


@pytest.mark.parametrize("layout", ["plain", "cpu_experts"])
@pytest.mark.parametrize("name", ["int4", "nf4", "int8, int8 tokens"])
def test_experts(name: str, layout: str) -> None:
    if (
        layout == "cpu_experts"
        and select("bmm", case_of(weights(name, (3, 32, 96))[0]), any_layout=True).layout is None
    ):
        pytest.skip("the native kernels are not built")
    w, inner = (v.to_layout(layout) for v in weights(name, (3, 32, 96)))
    x = torch.randn(3, 5, 96)
    gathered = x[..., w.perm]
    assert agree(torch.bmm(x, w.transpose(1, 2)), torch.bmm(gathered, inner.transpose(1, 2)), w, "bmm")
    assert agree(F.linear(x[1], w[1]), F.linear(gathered[1], inner[1]), w[1])
    ends = torch.tensor([2, 2, 12], dtype=torch.int32)
    rows, put = torch.randn(12, 96).bfloat16(), w.perm
    w, inner = w.bfloat16(), inner.bfloat16()
    expected = torch._grouped_mm(rows[:, put], inner.transpose(1, 2), offs=ends)
    assert agree(torch._grouped_mm(rows, w.transpose(1, 2), offs=ends), expected, w, "bmm")
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda a, b: torch.bmm(a, b.transpose(1, 2)), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.bfloat16(), w), torch.bmm(x.bfloat16(), w.transpose(1, 2)))


def test_one_weight_expanded_over_a_batch() -> None:
    w, inner = weights("int4")
    x = torch.randn(3, 5, 96)
    expected = torch.bmm(x[..., w.perm], inner.t().expand(3, 96, 32))
    assert agree(torch.bmm(x, w.t().expand(3, 96, 32)), expected, w)


@pytest.mark.parametrize("name", ["int4", "nf4", "nf4 double", "int8"])
def test_embedding(name: str) -> None:
    w, _ = weights(name)
    index = torch.tensor([[3, 31], [0, 3]])
    for table in (w, prepare(w, ("embedding",)), prepare(w)):
        assert torch.equal(F.embedding(index, table), w.dequantize()[index])


def test_convolution_dequantizes() -> None:
    w = QT.from_float(torch.randn(8, 4, 3), QuantSpec(INT8, (-1, -1))).with_(perm=torch.tensor([2, 0, 1]))
    x = torch.randn(2, 4, 9)
    pw.reset_fallbacks()
    torch.testing.assert_close(F.conv1d(x, w), F.conv1d(x, w.dequantize()))
    assert pw.fallbacks() == {"convolution/dequantize": 1}


def test_a_changed_order_is_seen() -> None:
    """What was bound to a weight must not outlive its order."""
    w, x = prepare(weights("int4")[0]), torch.randn(3, 96)
    linear(x, w)
    source = prepare(weights("int4")[0])
    w.copy_(source)
    assert torch.equal(linear(x, w), linear(x, source))
    w.data = prepare(weights("int4")[1])
    assert torch.equal(linear(x, w), F.linear(x, w.detach()))
    assert w.perm is None


def order(seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randperm(96, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("orders", "together"),
    [
        ([order(1), order(1), order(1, torch.int32)], True),
        ([order(1), order(1), order(2)], False),
        ([order(1), None, order(1)], False),
    ],
)
def test_layers_are_one_call_only_in_one_order(orders: list[Any], together: bool, monkeypatch: Any) -> None:
    layers, x, calls = [nn.Linear(96, 32).requires_grad_(False) for _ in orders], torch.randn(2, 96), []
    for layer, perm in zip(layers, orders, strict=True):
        w = QT.from_float(layer.weight, QuantSpec(INT4, (32,)), act=INT8_TOKEN).with_(perm=perm)
        layer.weight = nn.Parameter(prepare(w), requires_grad=False)
    if select("linear", case_of(layers[0].weight, x.dtype)).together is None:
        pytest.skip("the native kernels are not built")

    def counted(cases: Any, bind: Any = fused_linear._bind) -> Any:
        made = bind(cases)
        return None if made is None else made._replace(run=lambda *args: calls.append(1) or made.run(*args))

    monkeypatch.setattr(fused_linear, "_bind", counted)
    assert all(map(torch.equal, fused_linear.together(x, layers), [layer(x) for layer in layers]))
    assert bool(calls) == together
    if together:  # one of them gets another order in place, the weight its values
        layers[1].weight.copy_(prepare(weights("int4, int8 tokens")[0]))
        layers[1].weight.perm.copy_(order(5))
        assert all(map(torch.equal, fused_linear.together(x, layers), [layer(x) for layer in layers]))
        assert len(calls) == 1


def test_explain_says_it() -> None:
    w, _ = weights("int4")
    assert "with permuted channels" in str(explain(torch.float32, w))
    assert select("linear", case_of(prepare(w))).rank == select("linear", case_of(prepare(w.with_(perm=None)))).rank
