"""How the numbers of a quantized model are chosen: statistics, solvers, rewrites, tuners."""

from . import clip, gptq, hqq  # noqa: F401  they register
from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .observe import calibrate
from .quantize import quantize_
from .sparsify import sparsify_
from .statistics import STATISTICS, Statistic, register_statistic

__all__ = [
    "ALGORITHMS", "STATISTICS", "Rewrite", "Solution", "Solver", "Statistic", "Task", "Tuner", "calibrate", "quantize_",
    "register", "register_statistic", "sparsify_",
]  # fmt: skip
