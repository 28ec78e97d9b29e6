"""Every solver: how one is made for tests, and the cost that it promises never to make worse than round-to-nearest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pennyweight.algorithms import Solver, Task
from pennyweight.algorithms.solvers.block_search import MSE, Importance
from pennyweight.algorithms.solvers.gptq import GPTAQ, GPTQ, Auto, inverse_cholesky
from pennyweight.algorithms.solvers.hqq import HQQ
from pennyweight.algorithms.solvers.kmeans import KMeans
from pennyweight.algorithms.solvers.rtn import Nearest, output_error


def squares(task: Task, difference: Tensor) -> Tensor:
    return difference.square().sum(1)


def output(task: Task, difference: Tensor) -> Tensor:
    return output_error(difference.double(), task.stats["hessian"].double())


def importance(task: Task, difference: Tensor) -> Tensor:
    moment = task.stats["second_moment"]
    return (difference.square() * moment.repeat_interleave(len(difference) // len(moment), 0)).sum(1)


def norm(task: Task, difference: Tensor) -> Tensor:
    return difference.abs().pow(0.7).sum(1)


def towards_float(solver: GPTQ, task: Task, difference: Tensor) -> Tensor:
    """Output error against W + W E[(x_float - x) x^T] H^-1 / 2, with its damping: what "gptaq" and "auto" lower."""
    target = task.weight.double().clone()
    hessians = task.stats["hessian"]
    for rows, hessian, drift in zip(target.chunk(len(hessians)), hessians, task.stats["drift"], strict=True):
        damping, shrinkage = (of(len(hessian), task.tokens) for of in (solver.damping_of, solver.shrinkage_of))
        f = inverse_cholesky(hessian, damping, solver.activation_order, shrinkage)
        if f is not None:
            damped = hessian.double() + f.added.double().diag()
            rows += solver.asymmetric * torch.linalg.solve(damped, drift.double().t() @ rows.t()).t()
    return output_error(task.weight + difference.double() - target, hessians.double())


@dataclass(frozen=True)
class Enrolled:
    """make: the solver; cost: of each row of Wq - W; exempt: specs by name, and why each is left out."""

    make: Callable[[], Solver]
    cost: Callable[[Task, Tensor], Tensor]
    exempt: tuple[tuple[str, str], ...] = ()


SOLVERS = {
    "nearest": Enrolled(Nearest, squares),
    "mse": Enrolled(MSE, squares),
    "hqq": Enrolled(HQQ, norm),
    "imatrix": Enrolled(Importance, importance),
    "gptq": Enrolled(GPTQ, output),
    "kmeans": Enrolled(KMeans, output),
    "auto": Enrolled(Auto, partial(towards_float, Auto())),
    "gptaq": Enrolled(GPTAQ, partial(towards_float, GPTAQ())),
}
