"""How the numbers of a quantized model are chosen: statistics, solvers, rewrites, tuners, and search over them."""

from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .gptq import GPTAQ, GPTQ, Auto
from .improve import improve
from .nearest import Nearest
from .quantize import quantize_
from .sampling import sample
from .search import Search, search
from .statistics import STATISTICS, Statistic, register_statistic
from .tune import Tune

__all__ = [
    "ALGORITHMS", "GPTAQ", "GPTQ", "STATISTICS", "Auto", "Nearest", "Rewrite", "Search", "Solution", "Solver",
    "Statistic", "Task", "Tune", "Tuner", "improve", "quantize_", "register", "register_statistic", "sample", "search",
]  # fmt: skip
