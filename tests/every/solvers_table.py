"""Every solver: how one is made for tests, and the cost that it promises never to make worse than round-to-nearest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pennyweight.algorithms import Solver, Task
from pennyweight.algorithms.clip import MSE, Importance
from pennyweight.algorithms.gptq import GPTAQ, GPTQ, Auto
from pennyweight.algorithms.hqq import HQQ
from pennyweight.algorithms.nearest import Nearest, output_error


def squares(task: Task, difference: Tensor) -> Tensor:
    return difference.square().sum(1)


def output(task: Task, difference: Tensor) -> Tensor:
    return output_error(difference.double(), task.stats["hessian"].double())


def importance(task: Task, difference: Tensor) -> Tensor:
    moment = task.stats["second_moment"]
    return (difference.square() * moment.repeat_interleave(len(difference) // len(moment), 0)).sum(1)


def norm(task: Task, difference: Tensor) -> Tensor:
    return difference.abs().pow(0.7).sum(1)


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
    "auto": Enrolled(Auto, output),
    # at asymmetric > 0 it aims at the float model's output and promises no more than a finite solution; at 0 it is gptq
    "gptaq": Enrolled(lambda: GPTAQ(asymmetric=0.0), output),
}


def cost_of_nothing(task: Task) -> Tensor:
    return torch.zeros(task.weight.shape[0])
