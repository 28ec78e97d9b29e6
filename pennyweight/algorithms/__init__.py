"""Quantization algorithms: calibration statistics, solvers, rewrites, tuners, and mixed-precision search."""

from .base import ALGORITHMS, Rewrite, Solution, Solver, Task, Tuner, register
from .calibration.batches import sample
from .calibration.static_ranges import AccuracyWarning, calibrate
from .calibration.statistics import STATISTICS, Statistic, register_statistic
from .mixed_precision.search import Search, search
from .rewrites.awq import AWQ
from .rewrites.batch_norm import Fold
from .rewrites.quarot import Rotate
from .rewrites.smoothquant import Smooth
from .solvers.block_search import MSE, Importance
from .solvers.gptq import GPTAQ, GPTQ, Auto
from .solvers.hqq import HQQ
from .solvers.kmeans import KMeans
from .solvers.rtn import Nearest
from .sparsify import sparsify_
from .tuners.bias_correction import Bias
from .tuners.distill import Distill, Tune
from .tuners.finetune import improve
from .tuners.reconstruct import Reconstruct

__all__ = [
    "ALGORITHMS", "AWQ", "GPTAQ", "GPTQ", "HQQ", "MSE", "STATISTICS", "AccuracyWarning", "Auto", "Bias", "Distill",
    "Fold", "Importance", "KMeans", "Nearest", "Reconstruct", "Rewrite", "Rotate", "Search", "Smooth", "Solution",
    "Solver", "Statistic", "Task", "Tune", "Tuner", "calibrate", "improve", "register", "register_statistic",
    "sample", "search", "sparsify_",
]  # fmt: skip
