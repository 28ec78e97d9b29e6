"""From configs to quantized models: sites, plans, quantize_, reports."""

from .configs import AOBaseConfig, FqnToConfig
from .freeze import FrozenLinear, freeze_, thaw_
from .handlers import register_quantize_module_handler
from .measure import PerformanceWarning
from .plan import Plan, plan
from .quantize import dequantize_, quantize_
from .report import Latency, Report, Row
from .rules import PlanError
from .scheme import Scheme

__all__ = [
    "AOBaseConfig", "FqnToConfig", "FrozenLinear", "Latency", "PerformanceWarning", "Plan", "PlanError", "Report",
    "Row", "Scheme", "dequantize_", "freeze_", "plan", "quantize_", "register_quantize_module_handler", "thaw_",
]  # fmt: skip
