"""Training: quantization-aware training (qat/) and low-precision training (low_precision/)."""

from .low_precision.configs import (
    BitNetTrainingConfig,
    Float8TrainingConfig,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    LowPrecisionTrainingConfig,
    MXTrainingConfig,
)
from .low_precision.convert import convert_to_float8_training, stochastic_rounding, to_high_precision_
from .low_precision.grouped import grouped_mm
from .low_precision.linear import LowPrecisionLinear, linear
from .low_precision.recipes import FORWARD, RECIPES, Gemm, Operand, Recipe, get_recipe
from .qat.config import QATConfig
from .qat.distillation import Teacher, distillation_loss
from .qat.modules import FakeQuantized, FakeQuantizedEmbedding, FakeQuantizedLinear, enable_fake_quant
from .qat.param_groups import parameter_groups
from .qat.prepare import remove_fake_quant

__all__ = [
    "FORWARD",
    "RECIPES",
    "BitNetTrainingConfig",
    "FakeQuantized",
    "FakeQuantizedEmbedding",
    "FakeQuantizedLinear",
    "Float8TrainingConfig",
    "Gemm",
    "Int8MixedPrecisionTrainingConfig",
    "Int8WeightOnlyTrainingConfig",
    "LowPrecisionLinear",
    "LowPrecisionTrainingConfig",
    "MXTrainingConfig",
    "Operand",
    "QATConfig",
    "Recipe",
    "Teacher",
    "convert_to_float8_training",
    "distillation_loss",
    "enable_fake_quant",
    "get_recipe",
    "grouped_mm",
    "linear",
    "parameter_groups",
    "remove_fake_quant",
    "stochastic_rounding",
    "to_high_precision_",
]
