"""Quantized embeddings, and embeddings that share their quantized weight with the output layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.planning.granularity import Granularity, MappingType, PerAxis, PerGroup

from .quant_api import quantize_
from .v0_8_configs import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig

__all__ = [
    "EmbeddingQuantizer", "QuantizedEmbedding", "QuantizedEmbeddingFallback", "QuantizedLinear",
    "QuantizedSharedEmbedding", "QuantizedTiedEmbedding", "SharedEmbeddingQuantizer", "TiedEmbeddingQuantizer",
    "get_fqns_with_filter", "get_parent_by_fqn",
]  # fmt: skip

log = logging.getLogger(__name__)


class QuantizedEmbeddingFallback(nn.Module):
    """An embedding of ``bit_width`` bits, once :meth:`quantize_and_pack_weights` was called. Its state dict has the
    quantized weight as ``embedding.weight``."""

    def __init__(self, bit_width: int) -> None:
        super().__init__()
        self.bit_width = bit_width

    def quantize_and_pack_weights(self, weights: Tensor, group_size: int, mapping_type: MappingType) -> None:
        """Quantize a table [rows, width], in groups of ``group_size`` elements of a row; 0 or less: the row."""
        self.embedding = nn.Embedding(*weights.shape, device="meta")
        self.embedding.weight = nn.Parameter(weights.detach(), requires_grad=False)
        config = IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{self.bit_width}"), mapping_type=mapping_type,
            granularity=PerGroup(group_size) if group_size > 0 else PerAxis(0),
        )  # fmt: skip
        quantize_(self.embedding, config, lambda module, name: isinstance(module, nn.Embedding))

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x)


class QuantizedEmbedding(QuantizedEmbeddingFallback):
    """The same: torchao's differs in the kernel, which it has for ARM only."""

    @property
    def num_embeddings(self) -> int:
        return self.embedding.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.embedding.embedding_dim


class QuantizedTiedEmbedding(nn.Module):
    """An embedding whose table is the quantized weight of the output layer, [n, k]."""

    unembedding_packed_weights: Tensor

    def __init__(self, bit_width: int, unembedding_packed_weights: Tensor, group_size: int, n: int, k: int) -> None:
        super().__init__()
        self.bit_width, self.n, self.k = bit_width, n, k
        self.group_size = k if group_size == -1 else group_size
        self.register_buffer("unembedding_packed_weights", unembedding_packed_weights)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.unembedding_packed_weights)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight [n, k] and a bias, or None."""

    packed_weight: Tensor

    def __init__(
        self, packed_weight: Tensor, n: int, k: int, group_size: int, bit_width: int, bias: Tensor | None
    ) -> None:  # fmt: skip
        super().__init__()
        self.register_buffer("packed_weight", packed_weight)
        self.n, self.k, self.group_size, self.bit_width, self.bias = n, k, group_size, bit_width, bias

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.k:
            raise ValueError(f"QuantizedLinear expects inputs [.., {self.k}], got {list(x.shape)}")
        return nn.functional.linear(x, self.packed_weight, self.bias)


class EmbeddingQuantizer:
    """Replaces the embeddings of a model by :class:`QuantizedEmbedding`, in place.

    weight_dtype int1 to int8; granularity PerAxis(0) or PerGroup(n); use_fallback: QuantizedEmbeddingFallback instead
    """

    def __init__(
        self, weight_dtype: torch.dtype = torch.int4, granularity: Granularity | None = None,
        mapping_type: MappingType = MappingType.ASYMMETRIC, use_fallback: bool = False,
    ) -> None:  # fmt: skip
        granularity = PerAxis(0) if granularity is None else granularity
        known = {getattr(torch, f"int{b}"): b for b in range(1, 9)}
        if weight_dtype not in known:
            raise AssertionError(f"EmbeddingQuantizer: weight_dtype must be int1 to int8, got {weight_dtype}")
        if not isinstance(granularity, (PerGroup, PerAxis)) or getattr(granularity, "axis", 0) != 0:
            raise ValueError(f"Unsupported granularity: {granularity}; use PerAxis(0) or PerGroup(n)")
        self.bit_width, self.mapping_type, self.use_fallback = known[weight_dtype], mapping_type, use_fallback
        self.group_size = granularity.group_size if isinstance(granularity, PerGroup) else -1

    def quantize(self, model: nn.Module) -> nn.Module:
        """Returns the model. Raises ValueError if the model itself is an embedding, which cannot be replaced."""
        if isinstance(model, nn.Embedding):
            raise ValueError("EmbeddingQuantizer replaces embeddings in a model; wrap this one in nn.Sequential")
        for name in get_fqns_with_filter(model, lambda module, fqn: isinstance(module, nn.Embedding)):
            parent, child = get_parent_by_fqn(model, name)
            new = (QuantizedEmbeddingFallback if self.use_fallback else QuantizedEmbedding)(self.bit_width)
            new.quantize_and_pack_weights(getattr(parent, child).weight, self.group_size, self.mapping_type)
            setattr(parent, child, new)
        return model


def get_fqns_with_filter(module: nn.Module, filter_fn: Callable[[nn.Module, str], bool]) -> list[str]:
    """Names of the submodules that a filter selects, without those inside a selected one."""
    found: list[str] = []

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            if filter_fn(child, prefix + name):
                found.append(prefix + name)
            else:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found


def get_parent_by_fqn(root: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """(parent, last part of the name) of a submodule. Raises KeyError if there is no such parent."""
    path, _, name = fqn.rpartition(".")
    parent = dict(root.named_modules()).get(path)
    if parent is None:
        raise KeyError(f"Parent module {path} not found in model")
    return parent, name


class TiedEmbeddingQuantizer:
    """Quantizes output layers that share their weight with an embedding, and makes both use the one quantized weight.

    Inputs of the output layer are quantized to int8 per token. Layers become :class:`QuantizedTiedEmbedding` and
    :class:`QuantizedLinear`.
    """

    def __init__(
        self, weight_dtype: torch.dtype = torch.int4, granularity: Granularity | None = None,
        mapping_type: MappingType = MappingType.ASYMMETRIC,
    ) -> None:  # fmt: skip
        self.weight_dtype, self.mapping_type = weight_dtype, mapping_type
        self.granularity = PerAxis(0) if granularity is None else granularity

    def quantize(self, model: nn.Module, embedding_to_unembedding: Mapping[str, str] | None = None) -> None:
        """embedding_to_unembedding: names of embeddings and their output layers; None: those with equal weights.

        Raises ValueError if a weight has several candidates, AssertionError for names that are not such a pair.
        """
        embeddings = get_fqns_with_filter(model, lambda m, fqn: isinstance(m, nn.Embedding))
        linears = get_fqns_with_filter(model, lambda m, fqn: isinstance(m, nn.Linear))
        if embedding_to_unembedding is None:
            embedding_to_unembedding = _find_pairs(model, embeddings, linears)
        pairs = dict(embedding_to_unembedding)
        if len(set(pairs.values())) < len(pairs):
            raise ValueError(f"Found multiple candidate embeddings for one unembedding in {pairs}; give each its own")
        for embedding, linear in pairs.items():
            assert embedding in embeddings, f"Embedding {embedding} is not found in model"
            assert linear in linears, f"Unembedding {linear} is not found in model"
            assert _equal(model, embedding, linear), f"Embedding {embedding} does not share weights with {linear}"
        config = Int8DynamicActivationIntxWeightConfig(
            weight_dtype=self.weight_dtype, weight_granularity=self.granularity,
            weight_mapping_type=self.mapping_type,
        )  # fmt: skip
        for embedding, linear in pairs.items():
            old: Any = model.get_submodule(linear)
            alone = nn.Linear(old.in_features, old.out_features, False, "meta")
            alone.weight = nn.Parameter(old.weight.detach(), requires_grad=False)  # not the tied parameter itself
            quantize_(alone, config)
            weight: Any = alone.weight.detach()
            n, k = weight.shape
            group, bits = int(weight.block_size[1]), weight.spec.format.bits
            for name, new in (
                (embedding, QuantizedTiedEmbedding(bits, weight, group, n, k)),
                (linear, QuantizedLinear(weight, n, k, group, bits, old.bias)),
            ):
                parent, child = get_parent_by_fqn(model, name)
                setattr(parent, child, new)


def _equal(model: nn.Module, embedding: str, linear: str) -> bool:
    a: Any = model.get_submodule(embedding).weight
    b: Any = model.get_submodule(linear).weight
    return a is b or (a.shape == b.shape and torch.allclose(a, b))


def _find_pairs(model: nn.Module, embeddings: list[str], linears: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for embedding in embeddings:
        found = [linear for linear in linears if _equal(model, embedding, linear)]
        if len(found) > 1:
            raise ValueError(
                f"Found multiple candidate unembeddings {found} for embedding {embedding}; define "
                "embedding_to_unembedding"
            )
        if found:
            log.info("embedding %s shares its weight with %s", embedding, found[0])
            pairs[embedding] = found[0]
    return pairs


# Names of torchao.experimental.quant_api, 0.11 to 0.13.
QuantizedSharedEmbedding, SharedEmbeddingQuantizer = QuantizedTiedEmbedding, TiedEmbeddingQuantizer
