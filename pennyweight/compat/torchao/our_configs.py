"""Ours under the names that are torchao's too: configs that need nothing besides."""

from ...models.configs import (
    AOBaseConfig,
    AOPerModuleConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FPXWeightOnlyConfig,
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    ModuleFqnToConfig,
    MXDynamicActivationMXWeightConfig,
    NF4WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    float8_dynamic_activation_float8_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    fpx_weight_only,
)

nf4_weight_only = NF4WeightOnlyConfig

__all__ = [
    "AOBaseConfig",
    "AOPerModuleConfig",
    "FPXWeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FqnToConfig",
    "Int8StaticActivationInt8WeightConfig",
    "MXDynamicActivationMXWeightConfig",
    "ModuleFqnToConfig",
    "NF4WeightOnlyConfig",
    "NVFP4WeightOnlyConfig",
    "float8_dynamic_activation_float8_weight",
    "float8_static_activation_float8_weight",
    "float8_weight_only",
    "fpx_weight_only",
    "nf4_weight_only",
]
