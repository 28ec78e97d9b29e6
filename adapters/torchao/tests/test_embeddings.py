"""torchao.prototype.quantization: static float8, packed unsigned integers, embeddings, lookup tables."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from pennyweight_torchao.prototype.quantization.embedding import api
from pennyweight_torchao.quantization import (
    IntxWeightOnlyConfig,
    MappingType,
    PerAxis,
    PerGroup,
    PerToken,
    quantize_,
)

# -- static float8 -----------------------------------------------------------------------------------------------------


# -- packed unsigned integers ------------------------------------------------------------------------------------------


# -- embeddings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", [PerAxis(0), PerGroup(8)])
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.ASYMMETRIC])
@pytest.mark.parametrize("fallback", [True, False])
def test_embeddings_are_replaced(granularity: Any, mapping: Any, fallback: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Embedding(20, 16)), nn.Linear(16, 4))
    same = nn.Sequential(copy.deepcopy(model[0][0]))
    found = api.EmbeddingQuantizer(torch.int4, granularity, mapping, use_fallback=fallback).quantize(model)
    assert found is model
    assert type(model[0][0]) is (api.QuantizedEmbeddingFallback if fallback else api.QuantizedEmbedding)
    quantize_(
        same,
        IntxWeightOnlyConfig(torch.int4, granularity, mapping),
        lambda module, name: isinstance(module, nn.Embedding),
    )
    ids = torch.randint(0, 20, (2, 3))
    assert torch.equal(model[0][0](ids), same[0](ids))
    assert type(model[1].weight) is nn.Parameter
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved)["0.0.embedding.weight"].dequantize(), same[0].weight.dequantize())


def test_embedding_errors() -> None:
    with pytest.raises(AssertionError, match="int1 to int8"):
        api.EmbeddingQuantizer(torch.uint4)
    with pytest.raises(ValueError, match="Unsupported granularity"):
        api.EmbeddingQuantizer(torch.int4, PerToken())
    with pytest.raises(ValueError, match=r"wrap this one in nn\.Sequential"):
        api.EmbeddingQuantizer().quantize(nn.Embedding(4, 8))
    with pytest.raises(KeyError, match="Parent module a not found"):
        api.get_parent_by_fqn(nn.Sequential(), "a.b")


class _Language(nn.Module):
    def __init__(self, shared: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 20, bias=bias)
        if shared:
            self.head.weight = self.table.weight
        else:
            self.head.weight.data.copy_(self.table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(ids)).relu())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_tied_embeddings_share_one_quantized_weight(shared: bool, bias: bool) -> None:
    model, ids = _Language(shared, bias), torch.randint(0, 20, (2, 5))
    want = model(ids)
    api.TiedEmbeddingQuantizer(torch.int8, PerGroup(16), MappingType.SYMMETRIC).quantize(model)
    assert type(model.table) is api.QuantizedTiedEmbedding
    assert type(model.head) is api.QuantizedLinear
    weight = model.head.packed_weight
    assert model.table.unembedding_packed_weights is weight
    assert (model.head.n, model.head.k, model.head.group_size, model.head.bit_width) == (20, 32, 16, 8)
    assert torch.equal(model.table(ids), weight.dequantize()[ids])
    got = model(ids)
    assert got.shape == want.shape
    assert (got - want).norm().item() < 0.03 * want.norm().item()
    with pytest.raises(ValueError, match=r"inputs \[\.\., 32\]"):
        model.head(torch.randn(2, 31))


def test_ambiguous_ties_are_refused() -> None:
    model = _Language()
    model.second = nn.Linear(32, 20, bias=False)
    model.second.weight = model.table.weight
    with pytest.raises(ValueError, match="multiple candidate unembeddings"):
        api.TiedEmbeddingQuantizer().quantize(model)
    api.TiedEmbeddingQuantizer().quantize(model, {"table": "second"})
    assert type(model.second) is api.QuantizedLinear
    assert type(model.head) is nn.Linear
    with pytest.raises(AssertionError, match="Embedding body is not found"):
        api.TiedEmbeddingQuantizer().quantize(_Language(), {"body": "head"})
    other = _Language(shared=False)
    other.head.weight.data += 1
    with pytest.raises(AssertionError, match="does not share weights"):
        api.TiedEmbeddingQuantizer().quantize(other, {"table": "head"})
