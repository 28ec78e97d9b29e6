"""Tensors that scale their input per channel. What all tensors do is tested with the others' tests, by the names in
tests/tensors.py that end in _scaled; here is what only they do."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.formats import E4M3, INT4, INT8, UINT4
from pennyweight.core.spec import NF4_DOUBLE, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.core.tensor import rebuild
from pennyweight.kernels.repack import prepare
from tests.tensors import INT8_STATIC, INT8_TOKEN, SCALED, quantized

EACH = pytest.mark.parametrize("name", SCALED)
WEIGHTS: dict[str, tuple[QuantSpec, ActivationSpec | None]] = {
    "int8": (QuantSpec(INT8, (-1,)), None),
    "int8 dynamic": (QuantSpec(INT8, (-1,)), INT8_TOKEN),
    "int8 static": (QuantSpec(INT8, (-1,)), INT8_STATIC),
    "uint4 groups": (QuantSpec(UINT4, (32,), scale=torch.bfloat16, offset=torch.bfloat16, mid=8), None),
    "float8": (QuantSpec(E4M3, (-1,)), None),
    "nf4 double": (NF4_DOUBLE, None),
}
BIND = pytest.mark.parametrize("kind", WEIGHTS)


def weights(kind: str, rows: int = 24, columns: int = 96) -> tuple[QT, QT]:
    """(with a pre_scale, without it), packed for their kernels."""
    spec, act = WEIGHTS[kind]
    w = QT.from_float(torch.randn(rows, columns), spec, act=act)
    if act is INT8_STATIC:
        w = w.with_(act_scale=torch.tensor([0.03]))
    pre = torch.rand(columns) * 1.5 + 0.25
    return prepare(w.with_(pre_scale=pre)), prepare(w)


@EACH
def test_value(name: str) -> None:
    w = quantized(name, (8, 90))
    value = w.dequantize()
    assert torch.equal(value, w.with_(pre_scale=None).dequantize() * w.pre_scale)
    assert w.nbytes == w.with_(pre_scale=None).nbytes + 4 * 90
    assert "pre_scale=[90]" in repr(w)
    assert torch.equal(w.t().dequantize(), value.t())
    assert w.dequantize(torch.bfloat16).dtype is torch.bfloat16


def test_with_an_order_too() -> None:
    """The factors are in the order of the value, not in that of the codes."""
    w = quantized("int4_perm")
    pre = torch.rand(96) + 0.5
    both = w.with_(pre_scale=pre)
    torch.testing.assert_close(both.dequantize(), w.dequantize() * pre)
    x = torch.randn(3, 96)
    torch.testing.assert_close(F.linear(x, both), F.linear(x * pre, w))


@BIND
def test_products_scale_their_input(kind: str) -> None:
    """Every way to multiply gives what the bare weight gives for the scaled input, to the same bits."""
    w, bare = weights(kind)
    assert w.spec.layout == bare.spec.layout  # so it has the kernel of the bare one
    bias = torch.randn(24)
    for x in (torch.randn(5, 96), torch.randn(2, 3, 96), torch.randn(96), torch.randn(1, 96).bfloat16()):
        scaled = (x * w.pre_scale).to(x.dtype)
        assert torch.equal(F.linear(x, w), F.linear(scaled, bare))
        assert torch.equal(F.linear(x, w, bias.to(x.dtype)), F.linear(scaled, bare, bias.to(x.dtype)))
        if x.ndim == 2:
            assert torch.equal(x @ w.t(), scaled @ bare.t())
            assert torch.equal(torch.addmm(bias.to(x.dtype), x, w.t()), torch.addmm(bias.to(x.dtype), scaled, bare.t()))
    with pytest.raises(pw.ArgumentError, match="the last axis of the input must be 96"):
        F.linear(torch.randn(5, 95), w)


@BIND
def test_gradients_and_graphs(kind: str) -> None:
    w, bare = weights(kind)
    x = torch.randn(5, 96, requires_grad=True)
    y = F.linear(x, w)
    y.sum().backward()
    torch.testing.assert_close(x.grad, w.dequantize().sum(0).expand(5, 96), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(F.linear, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x.detach(), w), y.detach())
    assert len({id(compiled(x.detach(), v)) for v in (w, bare)}) == 2
    torch.testing.assert_close(compiled(x.detach(), bare), F.linear(x.detach(), bare))
    each = torch.func.vmap(lambda row: F.linear(row, w))(x.detach())
    torch.testing.assert_close(each, torch.stack([F.linear(row, w) for row in x.detach()]))


def test_batches_experts_and_tables() -> None:
    e = QT.from_float(torch.randn(3, 16, 64), QuantSpec(INT8, (-1,)))
    pre = torch.rand(64) + 0.5
    x = torch.randn(3, 5, 64)
    torch.testing.assert_close(
        torch.bmm(x, e.with_(pre_scale=pre).transpose(1, 2)), torch.bmm(x * pre, e.transpose(1, 2))
    )
    table = QT.from_float(torch.randn(10, 64), QuantSpec(INT8, (-1,)))
    index = torch.tensor([[3, 4], [9, 0]])
    torch.testing.assert_close(F.embedding(index, table.with_(pre_scale=pre)), F.embedding(index, table) * pre)


def test_factors_that_change_in_place_are_seen() -> None:
    w, bare = weights("int8")
    x = torch.randn(2, 96).bfloat16()
    F.linear(x, w)
    with torch.no_grad():
        w.pre_scale.mul_(2)
    assert torch.equal(F.linear(x, w), F.linear((x * w.pre_scale).to(x.dtype), bare))


def test_no_kernel_of_another_op_forgets_it() -> None:
    """A convolution has no input channel on its last axis; its value is still right."""
    w = QT.from_float(torch.randn(8, 4, 3, 3), QuantSpec(INT8, (-1, -1, -1))).with_(
        pre_scale=torch.tensor([1.0, 2.0, 0.5])
    )
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(F.conv2d(x, w), F.conv2d(x, w.dequantize()), rtol=1e-4, atol=1e-4)
    table = str(pw.explain(x, w))
    assert "the weight has a pre_scale" in table


@EACH
def test_slices_joins_and_picks(name: str) -> None:
    w = quantized(name, (32, 128))
    value = w.dequantize()
    uses: list[Callable[[Any], Tensor]] = [
        lambda t: t[3], lambda t: t[1:9], lambda t: t[:, 64:], lambda t: t.t()[64:], lambda t: t.view(4, 8, 128),
        lambda t: torch.cat([t, t]), lambda t: torch.cat([t, t], 1), lambda t: torch.stack([t, t]),
        lambda t: t[torch.tensor([2, 0])], lambda t: t.unsqueeze(0).expand(2, 32, 128), lambda t: t.split(16)[1],
    ]  # fmt: skip
    with pw.kernels.strict():
        for use in uses:
            part = use(w)
            assert isinstance(part, QT)
            assert torch.equal(part.dequantize(), use(value))
    with pw.kernels.strict(), pytest.raises(pw.FallbackError):  # factors beside none: no one tensor has both
        torch.cat([w, w.with_(pre_scale=None)])
    with pytest.raises(RuntimeError, match="outside it"):
        w[:4].mul_(2)


@EACH
def test_writes_keep_it(name: str) -> None:
    """A float value is quantized for the same factors; parts of another such weight are copied with theirs."""
    w = quantized(name)
    pre, new = w.pre_scale.clone(), torch.randn(w.shape)
    w.copy_(new)
    assert torch.equal(w.pre_scale, pre)
    assert w.error(new) > 15
    other = quantized(name)
    w.copy_(other)
    assert torch.equal(w.pre_scale, other.pre_scale)
    assert torch.equal(w.dequantize(), other.dequantize())
    same = w.requantize(QuantSpec(INT8, (16,)))
    assert torch.equal(same.pre_scale, w.pre_scale)
    assert same.error(w.dequantize()) > 35
    dead = w.with_(pre_scale=torch.zeros(96))
    dead.copy_(new)
    assert torch.equal(dead.dequantize(), torch.zeros(w.shape))


def test_wrong_factors_are_refused() -> None:
    w = quantized("int8_row")
    for wrong in (torch.ones(95), torch.ones(1, 96), torch.ones(96, dtype=torch.float16), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="one number per entry of the last stored axis"):
            w.with_(pre_scale=wrong)
    scaled = w.with_(pre_scale=torch.ones(96))
    assert torch.equal(pickle.loads(pickle.dumps(scaled)).pre_scale, scaled.pre_scale)
    fn, (static, held, *rest) = scaled.__reduce_ex__(4)
    assert fn is rebuild
    with pytest.raises(ValueError, match="pre_scale contains NaN or inf"):
        rebuild(static, {**held, "pre_scale": torch.full((96,), torch.nan)}, *rest)
    assert scaled._stable_hash_for_caching() != w._stable_hash_for_caching()


def model(kind: str) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 8))
    layers[0].weight = nn.Parameter(weights(kind)[0], requires_grad=False)
    return layers


@BIND
def test_models_are_saved_frozen_fused_and_converted(kind: str, tmp_path: Path) -> None:
    layers = model(kind)
    x = torch.randn(4, 96)
    y = layers(x)
    pw.save(layers, tmp_path / "m.safetensors")
    other = nn.Sequential(nn.Linear(96, 24), nn.ReLU(), nn.Linear(24, 8))
    other.load_state_dict(pw.load(tmp_path / "m.safetensors"), assign=True)
    assert torch.equal(other[0].weight.dequantize(), layers[0].weight.dequantize())
    torch.testing.assert_close(other(x), y, rtol=1e-4, atol=1e-4)
    pw.inference.freeze_(other)
    torch.testing.assert_close(other(x), y, rtol=1e-4, atol=1e-4)
    pw.fuse_(layers, x)
    torch.testing.assert_close(layers(x), y, rtol=1e-4, atol=1e-4)
    pw.dequantize_(layers)
    tolerance = 0.2 if WEIGHTS[kind][1] else 1e-4
    torch.testing.assert_close(layers(x), y, rtol=tolerance, atol=tolerance)


def test_formats_of_other_libraries_get_its_value(tmp_path: Path) -> None:
    """None of them has these factors: the weight is requantized, and the report says why."""
    layers = nn.Sequential(nn.Linear(128, 64, bias=False))
    w = QT.from_float(torch.randn(64, 128), QuantSpec(INT4, (32,), scale=torch.float16))
    layers[0].weight = nn.Parameter(w.with_(pre_scale=torch.rand(128) + 0.5), requires_grad=False)
    pw.save(layers, tmp_path / "native")
    report = pw.convert(tmp_path / "native", tmp_path / "ct", to="compressed-tensors")
    assert "its input is scaled per channel" in str(report)
    back = pw.load(tmp_path / "ct")["0.weight"]
    assert back.pre_scale is None
    assert back.error(layers[0].weight.dequantize()) > 15
