"""How the numbers of a quantized model are chosen: statistics, solvers, rewrites, tuners, and search over them."""

from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .clip import MSE, Importance
from .gptq import GPTAQ, GPTQ, Auto
from .hqq import HQQ
from .improve import improve
from .nearest import Nearest
from .observe import calibrate
from .quantize import quantize_
from .sampling import sample
from .search import Search, search
from .sparsify import sparsify_
from .statistics import STATISTICS, Statistic, register_statistic
from .tune import Tune

__all__ = [
    "ALGORITHMS", "GPTAQ", "GPTQ", "HQQ", "MSE", "STATISTICS", "Auto", "Importance", "Nearest", "Rewrite", "Search",
    "Solution", "Solver", "Statistic", "Task", "Tune", "Tuner", "calibrate", "improve", "quantize_", "register",
    "register_statistic", "sample", "search", "sparsify_",
]  # fmt: skip
