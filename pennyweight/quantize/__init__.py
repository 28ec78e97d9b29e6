"""Applies configs to models: sites, plans, quantize_, reports."""

from .config_resolution import PlanError
from .configs import AOBaseConfig, FqnToConfig
from .freeze import FrozenLinear, freeze_, thaw_
from .fused_linear import together
from .layer_timing import PerformanceWarning
from .module_handlers import register_quantize_module_handler
from .pipeline import dequantize_, quantize_
from .plan import Plan, plan
from .recommend_config import recommend
from .recommendation import Candidate, Recommendation
from .report import Latency, Report, Row
from .scheme import Scheme

__all__ = [
    "AOBaseConfig", "Candidate", "FqnToConfig", "FrozenLinear", "Latency", "PerformanceWarning", "Plan", "PlanError",
    "Recommendation", "Report", "Row", "Scheme", "dequantize_", "freeze_", "plan", "quantize_", "recommend",
    "register_quantize_module_handler", "thaw_", "together",
]  # fmt: skip
