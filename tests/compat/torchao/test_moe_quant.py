"""Quantized experts by torchao's names: values, the tensor with an extra axis, errors."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.compat.torchao.algorithms.codebook import CodebookQuantizedTensor, codebook_weight_only
from pennyweight.compat.torchao.algorithms.moe_quant import (
    FakeExtraDimTensor,
    MOEFeedForwardAOQuantizable,
    MoEQuantConfig,
    UseFakeExtraDimTensor,
    cond_ffn_filter,
    moe_filter,
)
from pennyweight.compat.torchao.quant_api import quantize_
from pennyweight.core.tensor import AffineQuantizedTensor

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def moe() -> MOEFeedForwardAOQuantizable:
    torch.manual_seed(1)
    made = MOEFeedForwardAOQuantizable(64, 32, 4, 2, shared_expert=nn.Linear(64, 64), empty_init=False)
    return made.requires_grad_(False)


def dense(moe: MOEFeedForwardAOQuantizable, x: torch.Tensor) -> torch.Tensor:
    """All experts for all tokens."""
    flat, e = x.reshape(-1, 64), moe.experts
    every = torch.stack(
        [F.linear(e.act_fn(F.linear(flat, a)) * F.linear(flat, c), b) for a, b, c in zip(e.w1, e.w2, e.w3, strict=True)]
    )
    scores, chosen = moe.router(flat).softmax(-1).topk(2)
    weights = torch.zeros(flat.shape[0], 4).scatter(1, chosen, scores / scores.sum(-1, keepdim=True))
    out = torch.einsum("te,etd->td", weights, every)
    assert moe.shared_expert is not None
    return (out + moe.shared_expert(flat)).reshape(x.shape)


def test_the_module(moe: MOEFeedForwardAOQuantizable) -> None:
    torch.testing.assert_close(moe(X), dense(moe, X), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(moe(X[:1, :1]), dense(moe, X[:1, :1]), rtol=1e-3, atol=1e-2)
    moe.return_scores = True
    out, scores = moe(X)
    assert (out.shape, scores.shape) == ((2, 5, 64), (10, 2))
    torch.testing.assert_close(scores.sum(-1), torch.ones(10))
    assert moe_filter(moe, "")
    assert cond_ffn_filter(moe.experts, "")
    assert not moe_filter(moe.experts, "")


@pytest.mark.parametrize("fake", list(UseFakeExtraDimTensor))
@pytest.mark.parametrize("base", [pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt8WeightConfig()])
def test_quantized_experts(base: Any, fake: Any, moe: MOEFeedForwardAOQuantizable) -> None:
    model = nn.Sequential(copy.deepcopy(moe))
    y = model(X)
    quantize_(model, MoEQuantConfig(base, fake), cond_ffn_filter)
    w: Any = model[0].experts.w1  # type: ignore[union-attr]
    kind = FakeExtraDimTensor if fake is UseFakeExtraDimTensor.TRUE else AffineQuantizedTensor
    assert type(w) is kind
    assert w.shape == (4, 32, 64)
    assert type(w[1]) is AffineQuantizedTensor
    alone = nn.Sequential(nn.Linear(64, 32, bias=False))
    alone[0].weight.data = moe.experts.w1[1].clone()
    pw.quantize_(alone, base)
    assert torch.equal(w[1].dequantize(), alone[0].weight.dequantize())  # type: ignore[operator]
    assert pw.core.numerics.sqnr(y, model(X)) > 25
    assert torch.equal(copy.deepcopy(model)(X), model(X))
    assert list(model.state_dict()) == list(nn.Sequential(moe).state_dict())


def test_a_class_without_a_form_for_all_experts(moe: MOEFeedForwardAOQuantizable) -> None:
    config = codebook_weight_only(torch.uint4, (1, 1), 32)
    model = nn.Sequential(copy.deepcopy(moe))
    quantize_(model, MoEQuantConfig(config), cond_ffn_filter)
    assert isinstance(model[0].experts.w2, FakeExtraDimTensor)  # type: ignore[union-attr]
    assert isinstance(model[0].experts.w2[0], CodebookQuantizedTensor)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="has no form for all experts at once"):
        quantize_(nn.Sequential(moe), MoEQuantConfig(config, UseFakeExtraDimTensor.FALSE), cond_ffn_filter)


def test_the_extra_axis() -> None:
    parts = [torch.full((2, 3), float(i)) for i in range(4)]
    w: Any = FakeExtraDimTensor(parts)
    assert (w.shape, w.num_tensors) == ((4, 2, 3), 4)
    assert torch.equal(w[2], parts[2])
    assert [t[0, 0].item() for t in w[1:4:2].tensor_list] == [1, 3]
    assert [t[0, 0].item() for t in w[torch.tensor([3, 0])].tensor_list] == [3, 0]
    assert [t[0, 0].item() for t in FakeExtraDimTensor(parts[:1], w[2:]).tensor_list] == [0, 2, 3]
    assert [t[0, 0].item() for t in FakeExtraDimTensor([], w[2:]).tensor_list] == [2, 3]
    assert "containing 4" in repr(w)
    assert w.detach().clone().num_tensors == 4
    assert torch.equal(F.linear(torch.ones(1, 3), w[2:3]), torch.full((1, 2), 6.0))
    names, context = w.__tensor_flatten__()
    assert names == ["head_tensor", "tensor_tail"]
    again: Any = FakeExtraDimTensor.__tensor_unflatten__(
        {n: getattr(w, n) for n in names}, context, w.shape, w.stride()
    )
    assert [t[0, 0].item() for t in again.tensor_list] == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="multiple tensors"):
        F.linear(torch.ones(1, 3), w)
    with pytest.raises(AssertionError, match="same shape"):
        FakeExtraDimTensor([torch.ones(1), torch.ones(2)])
    with pytest.raises(NotImplementedError, match="only axis 0"):
        w[:, 1]


def test_errors(moe: MOEFeedForwardAOQuantizable) -> None:
    moe.experts.w3 = nn.Parameter(torch.ones(2, 3))
    with pytest.raises(AssertionError, match=r"w3 must have 3 axes, got \[2, 3\]"):
        quantize_(nn.Sequential(moe), MoEQuantConfig(pw.Int8WeightOnlyConfig()), cond_ffn_filter)
