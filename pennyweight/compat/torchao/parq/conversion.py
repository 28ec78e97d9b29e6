"""From quantizers to configs, and the configs of a transformers model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ....planning.configs import AOBaseConfig, ModuleFqnToConfig
from ....planning.granularity import MappingType, PerAxis, PerGroup
from ..v0_8_configs import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig
from .affine_quantizers import Int4UnifTorchaoQuantizer, StretchedUnifTorchaoQuantizer, UnifTorchaoQuantizer
from .stretched_grid import StretchedIntxWeightConfig

__all__ = ["TRANSFORMERS_AVAIL", "_BIT_WIDTH_TO_DTYPE", "_get_config_from_quantizer", "_is_hf_model"]

TRANSFORMERS_AVAIL = importlib.util.find_spec("transformers") is not None
_BIT_WIDTH_TO_DTYPE = {bits: getattr(torch, f"int{bits}") for bits in range(1, 9)}


def _is_hf_model(model: nn.Module) -> bool:
    """Whether it has a config of transformers, which is not imported for this."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(getattr(model, "config", None), transformers.PretrainedConfig)


def _get_config_from_quantizer(
    quantizer: UnifTorchaoQuantizer, weight_only: bool, device: Any, b: int, block_size: int | None, version: int = 2
) -> AOBaseConfig:
    """:func:`config_of`; device and version have no effect."""
    return config_of(quantizer, weight_only, b, block_size)


def config_of(quantizer: UnifTorchaoQuantizer, weight_only: bool, bits: int, block: int | None) -> AOBaseConfig:
    """The config with the values of a quantizer: per output channel, or in groups of ``block``; else with int8
    activations per token."""
    granularity = PerAxis(0) if block is None else PerGroup(block)
    if isinstance(quantizer, Int4UnifTorchaoQuantizer):
        if block is None:
            raise ValueError("Int4UnifTorchaoQuantizer: Int4WeightOnlyConfig needs groups; set quant_block_size")
        return Int4WeightOnlyConfig(group_size=block)
    if isinstance(quantizer, StretchedUnifTorchaoQuantizer):
        return StretchedIntxWeightConfig(
            granularity, b=bits, quant_min=quantizer.quant_min, quant_max=quantizer.quant_max,
            activation_quantization=None if weight_only else "int8_asym_per_token",
        )  # fmt: skip
    if not 1 <= bits <= 8:
        raise ValueError(f"quant_bits must be 1 to 8 to be converted, got {bits}")
    dtype, mapping = getattr(torch, f"int{bits}"), quantizer.mapping_type
    if weight_only:
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity, mapping_type=mapping)
    return Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtype, weight_granularity=granularity, weight_mapping_type=mapping,
        act_mapping_type=MappingType.ASYMMETRIC,
    )  # fmt: skip


def attach_config(model: nn.Module, chosen: Sequence[tuple[Callable[..., bool], Any, bool]]) -> None:
    """Set ``model.config.quantization_config`` of a transformers model.

    chosen: for each group its filter, its config, and whether it has all linear layers, which makes it the default.
    """
    from transformers import TorchAoConfig

    by_name: dict[str, Any] = {}
    default = [config for _, config, whole in chosen if whole]
    if default:
        by_name["_default"] = default[-1]
    named = [(owns, config) for owns, config, whole in chosen if not (whole and config is default[-1])]
    tied, skipped = set(getattr(model, "_tied_weights_keys", None) or ()), []
    for name, module in model.named_modules():
        if not hasattr(module, "weight"):
            continue
        if f"{name}.weight" in tied or "norm" in name:
            skipped.append(name)
            continue
        by_name.update((name, config) for owns, config in named if owns(module))
    model.config.quantization_config = TorchAoConfig(
        quant_type=ModuleFqnToConfig(by_name), include_input_output_embeddings=True, modules_to_not_convert=skipped
    )
