"""torchao.quantization.prototype.qat._module_swap_api: other names of two quantizers and their switches."""

from __future__ import annotations

from .linear import disable_4w_fake_quant, disable_8da4w_fake_quant, enable_4w_fake_quant, enable_8da4w_fake_quant
from .quantizers import Int4WeightOnlyQATQuantizer, Int8DynActInt4WeightQATQuantizer

__all__ = [
    "Int4WeightOnlyQATQuantizerModuleSwap", "Int8DynActInt4WeightQATQuantizerModuleSwap",
    "disable_4w_fake_quant_module_swap", "disable_8da4w_fake_quant_module_swap", "enable_4w_fake_quant_module_swap",
    "enable_8da4w_fake_quant_module_swap",
]  # fmt: skip

Int4WeightOnlyQATQuantizerModuleSwap = Int4WeightOnlyQATQuantizer
Int8DynActInt4WeightQATQuantizerModuleSwap = Int8DynActInt4WeightQATQuantizer
enable_4w_fake_quant_module_swap, disable_4w_fake_quant_module_swap = enable_4w_fake_quant, disable_4w_fake_quant
enable_8da4w_fake_quant_module_swap = enable_8da4w_fake_quant
disable_8da4w_fake_quant_module_swap = disable_8da4w_fake_quant
