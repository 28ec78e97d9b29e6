"""Our configs that have torchao's names and need no adapter."""

from ...quantize.configs import (
    AOBaseConfig,
    AOPerModuleConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FPXWeightOnlyConfig,
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    ModuleFqnToConfig,
    MXDynamicActivationMXWeightConfig,
    NF4WeightOnlyConfig,
    NVFP4WeightOnlyConfig,
    UIntXWeightOnlyConfig,
    float8_dynamic_activation_float8_weight,
    float8_static_activation_float8_weight,
    float8_weight_only,
    fpx_weight_only,
    int8_weight_only,
    uintx_weight_only,
)

__all__ = [
    "AOBaseConfig", "AOPerModuleConfig", "FPXWeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig", "Float8StaticActivationFloat8WeightConfig", "Float8WeightOnlyConfig",
    "FqnToConfig", "Int8StaticActivationInt8WeightConfig", "Int8WeightOnlyConfig", "MXDynamicActivationMXWeightConfig",
    "ModuleFqnToConfig", "NF4WeightOnlyConfig", "NVFP4WeightOnlyConfig", "UIntXWeightOnlyConfig",
    "float8_dynamic_activation_float8_weight", "float8_static_activation_float8_weight", "float8_weight_only",
    "fpx_weight_only", "int8_weight_only", "uintx_weight_only",
]  # fmt: skip
