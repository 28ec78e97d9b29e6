"""torchao.quantization.qat.embedding: embeddings with a fake quantizer, and int4 embeddings with plain buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..enums import TorchAODType
from ..exported_ops import int4_values, is_exported
from ..operators.affine import define
from ..primitives import dequantize_affine
from .deployment import DeployedTable, Deployment, applies, deployment, spec_config
from .fake_quantize_configs import FakeQuantizeConfigBase, IntxFakeQuantizeConfig
from .fake_quantizers import FakeQuantizerBase
from .functions import _get_qmin_qmax

__all__ = ["FakeQuantizedEmbedding", "Int4WeightOnlyEmbedding", "Int4WeightOnlyQATEmbedding"]


class FakeQuantizedEmbedding(nn.Embedding):
    """An embedding whose table passes through a fake quantizer, ``weight_fake_quantizer`` (None without a config)."""

    weight_fake_quantizer: nn.Module | None
    deployment: Deployment | None = None

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        weight_config: FakeQuantizeConfigBase | None = None, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, *args, **kwargs
        )
        self.weight_fake_quantizer = None if weight_config is None else FakeQuantizerBase.from_config(weight_config)

    @property
    def fake_quantized(self) -> tuple[str, ...]:
        """Parameters that ``quantize_`` must not quantize before the layer is converted."""
        return () if self.weight_fake_quantizer is None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        quantizer, w = self.weight_fake_quantizer, self.weight
        if quantizer is not None:
            w = quantizer(w)
        if applies(self.deployment, None, quantizer, self.weight):
            assert self.deployment is not None
            w = DeployedTable.apply(w, self.deployment.weight(self.weight).dequantize())
        return F.embedding(
            x, w, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )  # fmt: skip

    def to_embedding(self) -> nn.Embedding:
        """A plain embedding with the same table; on the meta device with its own."""
        return _share(self, nn.Embedding(**_arguments(self), device="meta", dtype=self.weight.dtype))

    @classmethod
    def from_embedding(
        cls, mod: nn.Embedding, weight_config: FakeQuantizeConfigBase | None = None
    ) -> FakeQuantizedEmbedding:
        """A new embedding with the table of ``mod``; on the meta device with its own."""
        new = FakeQuantizedEmbedding(
            **_arguments(mod), weight_config=weight_config, device="meta", dtype=mod.weight.dtype
        )
        return _share(mod, new)

    def deploy(self, config: Any = None) -> None:
        """Compute, from now on, as this table will under ``config``; by default under what its config trains for."""
        weight = None if self.weight_fake_quantizer is None else getattr(self.weight_fake_quantizer, "config", None)
        config = spec_config(None, weight) if config is None else config
        plain = nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta", dtype=self.weight.dtype)
        self.deployment = deployment(plain, config, None, weight)


_ARGUMENTS = (
    "num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse",
)  # fmt: skip


def _arguments(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in _ARGUMENTS}


def _share(old: nn.Module, new: Any) -> Any:
    """``new``, which is on the meta device, with the table and the mode of ``old``."""
    if not old.weight.is_meta:
        new.weight = old.weight
    return new.train(old.training)


class Int4WeightOnlyQATEmbedding(FakeQuantizedEmbedding):
    """An embedding with int4 rows in groups, symmetric: computes as :class:`Int4WeightOnlyEmbedding` does."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, group_size: int = 32,
        scale_precision: torch.dtype = torch.float32, zero_point_precision: torch.dtype = torch.int32, *args: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        config = IntxFakeQuantizeConfig(
            TorchAODType.INT4, group_size=group_size, is_symmetric=True, scale_precision=scale_precision,
            zero_point_precision=zero_point_precision,
        )  # fmt: skip
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, config,
            *args, **kwargs,
        )  # fmt: skip

    def enable_fake_quant(self, enabled: bool = True) -> None:
        assert self.weight_fake_quantizer is not None
        self.weight_fake_quantizer.enabled = enabled

    def disable_fake_quant(self) -> None:
        self.enable_fake_quant(False)


class Int4WeightOnlyEmbedding(nn.Module):
    """An embedding of int4 codes in int8 [rows, dim], with ``scale`` and ``zero_point`` [rows, dim / group_size].

    Values are in ``output_dtype``. Only the rows that are looked up are dequantized.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, group_size: int = 32,
        scale_precision: torch.dtype = torch.float32, zero_point_precision: torch.dtype = torch.int32,
        device: Any = None, output_dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        define()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.bit_width, self.group_size = 4, group_size
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision
        self.output_dtype = output_dtype
        groups = (num_embeddings, embedding_dim // group_size)
        self.register_buffer("weight", torch.zeros((num_embeddings, embedding_dim), dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.zeros(groups, dtype=scale_precision, device=device))
        self.register_buffer("zero_point", torch.zeros(groups, dtype=zero_point_precision, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..] of row numbers -> [.., dim]. Rows longer than ``max_norm`` are scaled to it.

        An exported graph has torchao's op, on the whole table, as ExecuTorch expects it.
        """
        if is_exported(self.weight) and self.max_norm is None:
            table = int4_values(self.weight, self.scale, self.zero_point, self.group_size, self.output_dtype)
            return F.embedding(x, table, self.padding_idx)
        rows = x.reshape(-1)
        scale, zero = F.embedding(rows, self.scale), F.embedding(rows, self.zero_point)
        low, high = _get_qmin_qmax(self.bit_width)
        y = dequantize_affine(
            F.embedding(rows, self.weight), (1, self.group_size), scale, zero, torch.int8, low, high,
            output_dtype=self.output_dtype,
        )  # fmt: skip
        if self.max_norm is not None:
            norm = torch.linalg.vector_norm(y, self.norm_type, -1, keepdim=True)
            y = torch.where(norm > self.max_norm, y * (self.max_norm / (norm + 1e-7)), y)
        return y.reshape(*x.shape, self.embedding_dim)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        define()
