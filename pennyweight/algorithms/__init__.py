"""How the numbers of a quantized model are chosen: statistics, solvers, rewrites, tuners, and search over them."""

from .awq import AWQ
from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .bias import Bias
from .clip import MSE, Importance
from .gptq import GPTAQ, GPTQ, Auto
from .hqq import HQQ
from .improve import improve
from .kmeans import KMeans
from .nearest import Nearest
from .observe import calibrate
from .quantize import quantize_
from .reconstruct import Reconstruct
from .rotate import Rotate
from .sampling import sample
from .search import Search, search
from .smooth import Smooth
from .sparsify import sparsify_
from .statistics import STATISTICS, Statistic, register_statistic
from .tune import Distill, Tune

__all__ = [
    "ALGORITHMS", "AWQ", "GPTAQ", "GPTQ", "HQQ", "MSE", "STATISTICS", "Auto", "Bias", "Distill", "Importance",
    "KMeans", "Nearest", "Reconstruct", "Rewrite", "Rotate", "Search", "Smooth", "Solution", "Solver", "Statistic",
    "Task", "Tune", "Tuner", "calibrate", "improve", "quantize_", "register", "register_statistic", "sample",
    "search", "sparsify_",
]  # fmt: skip
