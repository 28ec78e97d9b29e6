"""Configs with torchao's names. Each is a frozen dataclass that returns a Scheme.

torchao's fields without a meaning here (``set_inductor_config``, ``version``, packing formats) are accepted, so that
code written for torchao runs. The kernel table chooses layouts, and no process-wide setting is ever changed. Rounding
and scales are bit-identical to torchao's formulas, checked against golden files.
"""

from . import serialize  # noqa: F401  (registers itself for to_json)
from .base import AOBaseConfig, SpecConfig, as_format
from .floating import (
    CodebookWeightOnlyConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Float8StaticActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FPXWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    MXWeightOnlyConfig,
    NF4WeightOnlyConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from .fqn import ContractedAxis, FqnToConfig
from .integer import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    UIntXWeightOnlyConfig,
)

__all__ = [
    "AOBaseConfig",
    "CodebookWeightOnlyConfig",
    "ContractedAxis",
    "FPXWeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "FqnToConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "SpecConfig",
    "UIntXWeightOnlyConfig",
    "as_format",
]
