"""Applies configs to models: sites, plans, quantize_, reports."""

import sys
from types import ModuleType
from typing import Any

from ..planning.config_resolution import PlanError
from ..planning.configs import AOBaseConfig, FqnToConfig
from ..planning.layer_timing import PerformanceWarning
from ..planning.module_handlers import register_quantize_module_handler
from ..planning.plan import Plan, plan
from ..planning.quantize_report import Latency, Report, Row
from ..planning.scheme import Scheme
from .dequantize import dequantize_
from .pipeline import quantize_

__all__ = [
    "AOBaseConfig", "FqnToConfig", "Latency", "PerformanceWarning", "Plan", "PlanError", "Report", "Row", "Scheme",
    "dequantize_", "plan", "quantize_", "register_quantize_module_handler",
]  # fmt: skip


class _Module(ModuleType):
    """This package; a call of it is a misspelt ``quantize_``."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("pennyweight.quantize is a module; the function is pennyweight.quantize_(model, config)")


sys.modules[__name__].__class__ = _Module
