"""torchao's QAT quantizers of two steps: ``prepare`` swaps layers for prepared ones, ``convert`` for quantized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.training.qat.module_patches import leave_fused_paths_

from ..groupwise import get_group_qparams_symmetric, groupwise_affine_quantize_tensor
from ..linear_modules import (
    Int8DynActInt4WeightLinear,
    TwoStepQuantizer,
    WeightOnlyInt4Linear,
    _replace_linear_8da4w,
    _replace_linear_int4,
    _replace_with_custom_fn_if_matches_filter,
)
from ..primitives import quantize_affine
from ..qparams import require
from .embedding import Int4WeightOnlyEmbedding, Int4WeightOnlyQATEmbedding
from .fake_quantize_configs import FakeQuantizeConfigBase, IntxFakeQuantizeConfig
from .functions import _get_qmin_qmax
from .linear import (
    Int4WeightOnlyQATLinear,
    Int8DynActInt4WeightQATLinear,
    _get_4w_weight_config,
    _get_8da4w_activation_config,
    _get_8da4w_weight_config,
)

__all__ = [
    "ComposableQATQuantizer", "Int4WeightOnlyEmbeddingQATQuantizer", "Int4WeightOnlyQATQuantizer",
    "Int8DynActInt4WeightQATQuantizer", "TwoStepQuantizer", "_LegacyQATQuantizer",
]  # fmt: skip


class _LegacyQATQuantizer(TwoStepQuantizer):
    """Base of the quantizers of linear layers, with the configs of the layers that they prepare."""

    def get_activation_fake_quantize_config(self) -> FakeQuantizeConfigBase | None:
        return None

    def get_weight_fake_quantize_config(self) -> FakeQuantizeConfigBase | None:
        return None


def _convert(model: nn.Module, kind: type[nn.Module], new: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace each module of a class; the new ones keep the mode of the old.

    torch's fused paths stay off: they would read the codes as a float weight.
    """
    with torch.no_grad():
        return _replace_with_custom_fn_if_matches_filter(
            model, lambda old: new(old).train(old.training), lambda m, fqn: isinstance(m, kind)
        )


def _int4_groups(w: Tensor, config: IntxFakeQuantizeConfig) -> tuple[Tensor, Tensor, Tensor]:
    """int4 codes in int8, scales and zero points of the groups of a weight, symmetric."""
    scales, zeros = get_group_qparams_symmetric(w, 4, config.group_size, config.scale_precision)
    zeros = zeros.to(config.zero_point_precision)
    codes = quantize_affine(w, (1, config.group_size), scales, zeros, torch.int8, *_get_qmin_qmax(4))
    return codes, scales, zeros


class Int8DynActInt4WeightQATQuantizer(_LegacyQATQuantizer):
    """int8 inputs per token, int4 weights in groups.

    prepare  :class:`Int8DynActInt4WeightQATLinear` for each linear layer whose inputs are whole groups; with
             ``padding_allowed`` for each, which raises where they are not
    convert  :class:`Int8DynActInt4WeightLinear`, with the buffers ``weight``, ``scales`` and ``zeros``

    precision, scales_precision: dtypes of the weights and of their scales. The layers take the parameters of the
    model's, in their own dtype.
    """

    def __init__(
        self, groupsize: int = 256, padding_allowed: bool = False, precision: torch.dtype = torch.float32,
        scales_precision: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.groupsize, self.padding_allowed = groupsize, padding_allowed
        self.precision, self.scales_precision = precision, scales_precision
        self.activation_scales_precision = torch.float32

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _replace_linear_8da4w(
            model, self.groupsize, self.padding_allowed, self.precision, self.scales_precision,
            Int8DynActInt4WeightQATLinear, copy_weights=True,
        )  # fmt: skip
        leave_fused_paths_(model)
        return model

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return _convert(model, Int8DynActInt4WeightQATLinear, self._converted)

    @staticmethod
    def _converted(old: Any) -> nn.Module:
        config = old.weight_fake_quantizer.config
        new = Int8DynActInt4WeightLinear(
            old.in_features, old.out_features, old.bias is not None, old.weight.device, groupsize=config.group_size,
            precision=old.weight.dtype, scales_precision=config.scale_precision,
        )  # fmt: skip
        new.weight, new.scales, new.zeros = _int4_groups(old.weight, config)
        if old.bias is not None:
            new.bias = old.bias.detach()
        return new

    def get_activation_fake_quantize_config(self) -> FakeQuantizeConfigBase:
        return _get_8da4w_activation_config(self.activation_scales_precision)

    def get_weight_fake_quantize_config(self) -> FakeQuantizeConfigBase:
        return _get_8da4w_weight_config(self.groupsize, self.scales_precision)


class Int4WeightOnlyQATQuantizer(_LegacyQATQuantizer):
    """uint4 weights in groups with tinygemm's zero points.

    prepare  :class:`Int4WeightOnlyQATLinear` for each linear layer without bias
    convert  :class:`WeightOnlyInt4Linear`, with the buffers ``weight`` (packed) and ``scales_and_zeros``

    Raises AssertionError for other tiles than 2, 4 and 8, and group sizes than 32, 64, 128 and 256.
    """

    def __init__(
        self, groupsize: int = 256, inner_k_tiles: int | None = 8, precision: torch.dtype = torch.bfloat16,
        scales_precision: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        require(inner_k_tiles in (2, 4, 8), f"inner_k_tiles must be 2, 4 or 8, got {inner_k_tiles}")
        require(groupsize in (32, 64, 128, 256), f"groupsize must be 32, 64, 128 or 256, got {groupsize}")
        self.inner_k_tiles, self.groupsize = inner_k_tiles, groupsize
        self.precision, self.scales_precision = precision, scales_precision

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _replace_linear_int4(
            model, self.groupsize, self.inner_k_tiles, padding_allowed=True, precision=self.precision,
            scales_precision=self.scales_precision, linear_class=Int4WeightOnlyQATLinear, copy_weights=True,
        )  # fmt: skip
        leave_fused_paths_(model)
        return model

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return _convert(model, Int4WeightOnlyQATLinear, self._converted)

    @staticmethod
    def _converted(old: Any) -> nn.Module:
        config = old.weight_fake_quantizer.config
        new = WeightOnlyInt4Linear(
            old.in_features, old.out_features, False, old.weight.device, None, config.group_size, old.inner_k_tiles,
            old.weight.dtype, config.scale_precision,
        )  # fmt: skip
        codes, both = groupwise_affine_quantize_tensor(old.weight, 4, config.group_size)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), old.inner_k_tiles)
        new.weight, new.scales_and_zeros = packed, both
        return new

    def get_weight_fake_quantize_config(self) -> FakeQuantizeConfigBase:
        return _get_4w_weight_config(self.groupsize, self.scales_precision)


class Int4WeightOnlyEmbeddingQATQuantizer(TwoStepQuantizer):
    """int4 embedding tables in groups.

    prepare  :class:`Int4WeightOnlyQATEmbedding` for each embedding
    convert  :class:`Int4WeightOnlyEmbedding`, with the buffers ``weight``, ``scale`` and ``zero_point``
    """

    def __init__(
        self, group_size: int = 256, scale_precision: torch.dtype = torch.float32,
        zero_point_precision: torch.dtype = torch.int32,
    ) -> None:  # fmt: skip
        self.bit_width, self.group_size = 4, group_size
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        def swap(old: Any) -> nn.Module:
            new = Int4WeightOnlyQATEmbedding(
                old.num_embeddings, old.embedding_dim, old.padding_idx, old.max_norm, old.norm_type,
                old.scale_grad_by_freq, old.sparse, self.group_size, self.scale_precision, self.zero_point_precision,
                device="meta", dtype=old.weight.dtype,
            )  # fmt: skip
            if not old.weight.is_meta:
                new.weight = old.weight
            return new.train(old.training)

        return _replace_with_custom_fn_if_matches_filter(model, swap, lambda m, fqn: isinstance(m, nn.Embedding))

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return _convert(model, Int4WeightOnlyQATEmbedding, self._converted)

    @staticmethod
    def _converted(old: Any) -> nn.Module:
        config = old.weight_fake_quantizer.config
        new = Int4WeightOnlyEmbedding(
            old.num_embeddings, old.embedding_dim, old.padding_idx, old.max_norm, old.norm_type,
            old.scale_grad_by_freq, old.sparse, config.group_size, config.scale_precision,
            config.zero_point_precision, old.weight.device, old.weight.dtype,
        )  # fmt: skip
        new.weight, new.scale, new.zero_point = _int4_groups(old.weight, config)
        return new


class ComposableQATQuantizer(TwoStepQuantizer):
    """Several quantizers, each for other modules, one after another."""

    def __init__(self, quantizers: list[TwoStepQuantizer]) -> None:
        self.quantizers = quantizers

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for quantizer in self.quantizers:
            model = quantizer.prepare(model)
        return model

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for quantizer in self.quantizers:
            model = quantizer.convert(model)
        return model
