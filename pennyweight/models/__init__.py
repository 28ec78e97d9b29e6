"""From configs to quantized models: sites, plans, quantize_, reports."""

from .configs import AOBaseConfig, FqnToConfig
from .freeze import FrozenLinear, freeze_, thaw_
from .handlers import register_quantize_module_handler
from .measure import PerformanceWarning
from .plan import Plan, plan
from .quantize import dequantize_, quantize_
from .recommendation import Candidate, Recommendation
from .recommending import recommend
from .report import Latency, Report, Row
from .rules import PlanError
from .scheme import Scheme
from .siblings import together

__all__ = [
    "AOBaseConfig", "Candidate", "FqnToConfig", "FrozenLinear", "Latency", "PerformanceWarning", "Plan", "PlanError",
    "Recommendation", "Report", "Row", "Scheme", "dequantize_", "freeze_", "plan", "quantize_", "recommend",
    "register_quantize_module_handler", "thaw_", "together",
]  # fmt: skip
