"""Runs the steps of a block in one native call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels.block import Call, Steps, run_reference


class Runner(Protocol):
    def run(self, x: Tensor, call: Call) -> Tensor | None: ...


class Reference:
    """The plain reference, for checks."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def run(self, x: Tensor, call: Call) -> Tensor | None:
        return run_reference(self.steps, x, call)


def runner(steps: Steps) -> Runner | str:
    """How to run the steps, or the reason why native code cannot."""
    return Reference(steps)
