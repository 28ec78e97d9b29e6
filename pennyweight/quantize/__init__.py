"""Applies configs to models: sites, plans, quantize_, reports."""

from ..planning.config_resolution import PlanError
from ..planning.configs import AOBaseConfig, FqnToConfig
from ..planning.layer_timing import PerformanceWarning
from ..planning.module_handlers import register_quantize_module_handler
from ..planning.plan import Plan, plan
from ..planning.report import Latency, Report, Row
from ..planning.scheme import Scheme
from .dequantize import dequantize_
from .pipeline import quantize_

__all__ = [
    "AOBaseConfig", "FqnToConfig", "Latency", "PerformanceWarning", "Plan", "PlanError", "Report", "Row", "Scheme",
    "dequantize_", "plan", "quantize_", "register_quantize_module_handler",
]  # fmt: skip
