"""From configs to quantized models: sites, plans, quantize_, reports."""

from .configs import AOBaseConfig, FqnToConfig
from .handlers import register_quantize_module_handler
from .plan import Plan, plan
from .quantize import dequantize_, quantize_
from .report import Report, Row
from .rules import PlanError
from .scheme import Scheme

__all__ = [
    "AOBaseConfig", "FqnToConfig", "Plan", "PlanError", "Report", "Row", "Scheme", "dequantize_", "plan", "quantize_",
    "register_quantize_module_handler",
]  # fmt: skip
