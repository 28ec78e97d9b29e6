"""Tensors whose contracted axis is stored in another order. What all tensors do is tested with the others' tests, by
the names in tests/tensors.py that end in _perm; here is what only they do."""

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8, NF4
from pennyweight.core.numerics import Parts
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.core.tensor import rebuild
from tests.tensors import REORDERED, quantized

GROUPS = QuantSpec(INT4, (32,))
EACH = pytest.mark.parametrize("name", REORDERED)


def other(w: QT) -> QT:
    """Another tensor of that spec and shape, in another order."""
    return QT.from_float(torch.randn(w.shape), w.spec).with_(perm=w.perm.flip(0))


@EACH
def test_value(name: str) -> None:
    """Stored entry j is entry perm[j]."""
    w = quantized(name, (8, 90))
    stored, value = w.with_(perm=None).dequantize(), w.dequantize()
    for j, k in enumerate(w.perm.tolist()):
        assert torch.equal(value[:, k], stored[:, j])
    assert value.is_contiguous()
    assert w.nbytes == w.with_(perm=None).nbytes + w.perm.nbytes
    assert "perm=[90]" in repr(w)
    assert torch.equal(w.t().dequantize(), value.t())


def test_sorting_channels_first_is_what_it_is_for() -> None:
    """Channels of like size in one group: less error than the same groups in the order of the channels."""
    x = torch.randn(16, 128) * torch.logspace(-2, 1, 128)[torch.randperm(128)]
    perm = x.abs().amax(0).argsort()
    sorted_first = QT.from_float(x[:, perm], GROUPS).with_(perm=perm)
    columns = (sorted_first.dequantize() - x).norm(dim=0) / x.norm(dim=0)
    plain = (QT.from_float(x, GROUPS).dequantize() - x).norm(dim=0) / x.norm(dim=0)
    assert columns.mean() < 0.5 * plain.mean()


@EACH
def test_rows_keep_the_order_and_channels_do_not(name: str) -> None:
    w = quantized(name)
    with pw.kernels.strict():
        for part in (
            w[3],
            w[1:9],
            w.t()[:, 2],
            w.unsqueeze(0),
            w.expand(2, 32, 96),
            w.view(4, 8, 96),
            torch.cat([w, w]),
        ):
            assert torch.equal(part.perm, w.perm)
        for use in (lambda: w[:, :32], lambda: w[:, 5], lambda: torch.cat([w, w], 1), w.flatten,
                    lambda: w[:, torch.tensor([1, 2])], lambda: w.t()[3]):  # fmt: skip
            with pytest.raises(pw.FallbackError):
                use()


def test_an_axis_of_one_entry_has_no_order() -> None:
    w = QT.from_float(torch.randn(5, 1), QuantSpec(INT8, (-1,))).with_(perm=torch.zeros(1, dtype=torch.int64))
    with pw.kernels.strict():
        assert w.squeeze(1).perm is None
        assert w.expand(5, 7).perm is None
        assert torch.equal(w.expand(5, 7).dequantize(), w.dequantize().expand(5, 7))


def test_joining() -> None:
    w = quantized("int4_perm")
    same = other(w).with_(perm=w.perm.long())
    with pw.kernels.strict():
        joined = torch.cat([w, same])
        stacked = torch.stack([w, same])
    assert torch.equal(joined.dequantize(), torch.cat([w.dequantize(), same.dequantize()]))
    assert torch.equal(stacked.dequantize(), torch.stack([w.dequantize(), same.dequantize()]))
    for second in (other(w), w.with_(perm=None)):
        with pw.kernels.strict(), pytest.raises(pw.FallbackError):
            torch.cat([w, second])


@EACH
def test_parts_are_copied_with_their_order(name: str) -> None:
    w = quantized(name)
    source, before = other(w), w.perm.data_ptr()
    w.copy_(source)
    assert w.perm.data_ptr() == before
    assert torch.equal(w.dequantize(), source.dequantize())
    assert torch.equal(w.perm, source.perm)


@EACH
def test_a_tensor_in_order_is_quantized_anew_and_the_order_stays(name: str) -> None:
    w = quantized(name)
    perm, plain = w.perm.clone(), QT.from_float(torch.randn(w.shape), w.spec)
    w.copy_(plain)
    assert torch.equal(w.perm, perm)
    assert w.error(plain.dequantize()) > 8
    plain.copy_(w)
    assert plain.perm is None
    assert plain.error(w.dequantize()) > 8


def test_what_is_made_of_a_tensor_has_an_order_of_its_own() -> None:
    w = quantized("int4_perm")
    value, perm = w.dequantize(), w.perm.clone()
    made = [w.clone(), torch.cat([w, w]), w[torch.tensor([1, 0])], w.index_select(0, torch.tensor([2, 2])),
            w.requantize(GROUPS)]  # fmt: skip
    for tensor in made:
        tensor.copy_(other(tensor))
        assert torch.equal(w.perm, perm)
        assert torch.equal(w.dequantize(), value)
    with pytest.raises(RuntimeError, match="its channel order with elements outside it"):
        w[:4].copy_(other(w[:4].clone()))


def test_state_dicts_fill_a_model_with_another_order() -> None:
    source, target = nn.Linear(96, 32, bias=False), nn.Linear(96, 32, bias=False)
    for layer in (source, target):
        layer.weight = nn.Parameter(quantized("uint4_perm"), requires_grad=False)
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.dequantize(), source.weight.dequantize())


def test_empty_like_has_some_order() -> None:
    w = quantized("nf4_perm").to("meta")
    empty = torch.empty_like(w, device="cpu")
    assert torch.equal(empty.perm, torch.arange(96))
    assert empty.perm.dtype == w.perm.dtype


def test_requantize_keeps_the_order_where_groups_need_it() -> None:
    w = quantized("int4_perm")
    fine = w.requantize(QuantSpec(INT8, (16,)))
    assert torch.equal(fine.perm, w.perm)
    assert fine.error(w.dequantize()) > 40
    whole = w.requantize(QuantSpec(INT8, (-1,)))
    assert whole.perm is None
    assert whole.error(w.dequantize()) > 30
    assert torch.equal(w.t().requantize(QuantSpec(NF4, (32,))).perm, w.perm)
    for layout in ("plain", "bits"):
        assert torch.equal(w.requantize(w.spec.with_(layout=layout)).dequantize(), w.dequantize())


def test_wrong_orders_are_refused() -> None:
    parts = QT.from_float(torch.randn(4, 64), GROUPS).parts
    for perm in (torch.arange(63), torch.arange(64).reshape(1, 64), torch.tensor(0)):
        with pytest.raises(ValueError, match="one entry per entry of the last stored axis"):
            QT(parts._replace(perm=perm), GROUPS, (4, 64))
    with pytest.raises(ValueError, match="one entry per entry of the last stored axis"):
        QT(
            Parts(torch.tensor(1, dtype=torch.int8), torch.tensor(1.0), perm=torch.arange(1)),
            GROUPS.with_(block=None),
            (),
        )
    w = QT(parts._replace(perm=torch.arange(64)), GROUPS, (4, 64))
    fn, (static, held, *rest) = w.__reduce_ex__(4)
    assert fn is rebuild
    twice = torch.arange(64)
    twice[3] = 5
    for perm in (
        torch.arange(63),
        torch.arange(1, 65),
        torch.arange(-1, 63),
        twice,
        torch.arange(64.0),
        torch.zeros(4, 64),
    ):
        with pytest.raises(ValueError, match="perm is no permutation of the"):
            rebuild(static, {**held, "perm": perm}, *rest)
    again = pickle.loads(pickle.dumps(w))
    assert torch.equal(again.perm, w.perm)


def test_compiled_functions_tell_it_from_one_in_order() -> None:
    w = quantized("int4_perm")
    assert w._stable_hash_for_caching() != w.with_(perm=None)._stable_hash_for_caching()
    names: Any = w.__tensor_flatten__()[0]
    assert "_perm" in names
    torch._dynamo.reset()
    calls = torch.compile(lambda v: v.dequantize() + 1, fullgraph=True, backend="aot_eager", dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.FallbackWarning)
        for v in (w, w.with_(perm=None), other(w), w[2:5], w.t()):
            assert torch.equal(calls(v), v.dequantize() + 1)
