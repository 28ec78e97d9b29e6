"""From configs to quantized models: sites, plans, quantize_, reports."""

from .configs import AOBaseConfig, FqnToConfig
from .plan import Plan, PlanError, plan
from .quantize import dequantize_, quantize_, register_quantize_module_handler
from .report import Report, Row
from .scheme import Scheme

__all__ = [
    "AOBaseConfig", "FqnToConfig", "Plan", "PlanError", "Report", "Row", "Scheme", "dequantize_", "plan", "quantize_",
    "register_quantize_module_handler",
]  # fmt: skip
