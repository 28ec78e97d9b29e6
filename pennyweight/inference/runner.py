"""Runs the steps of a block: in one native call, or by the plain reference."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..kernels.block import Call, Steps, run_reference
from ..kernels.native.block import compile_steps


class Runner(Protocol):
    """``run``: None if native code cannot take the call. ``converted``: whether a parameter has another dtype or
    device than when the steps were compiled."""

    def run(self, x: Tensor, call: Call) -> Tensor | None: ...

    def converted(self) -> bool: ...


class Reference:
    """The plain reference, for checks."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def run(self, x: Tensor, call: Call) -> Tensor | None:
        return run_reference(self.steps, x, call)

    def converted(self) -> bool:
        return False


def runner(steps: Steps) -> Runner | str:
    """How native code runs the steps, or the reason why it cannot."""
    return compile_steps(steps)
