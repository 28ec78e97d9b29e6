"""How the numbers of a quantized model are chosen: statistics, solvers, rewrites, tuners."""

from . import awq, bias, gptq, rotate, smooth  # noqa: F401  they register
from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .quantize import quantize_
from .statistics import STATISTICS, Statistic, register_statistic

__all__ = [
    "ALGORITHMS", "STATISTICS", "Rewrite", "Solution", "Solver", "Statistic", "Task", "Tuner", "quantize_", "register",
    "register_statistic",
]  # fmt: skip
