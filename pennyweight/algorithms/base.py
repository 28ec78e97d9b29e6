"""What an algorithm is: a Solver chooses the numbers of one weight, a Rewrite changes a model but not its function.

Both are frozen dataclasses whose fields are their options, registered by name, so that a recipe can be written as data:
``"gptq"``, ``{"gptq": {"damping": 0.05}}``, ``["rotate", "smooth", "gptq"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from ..core.numerics import Parts
from ..core.spec import QuantSpec
from ..quantize.scheme import Scheme


@dataclass(frozen=True)
class Task:
    """One weight to solve.

    weight  float32 [N, K], contracted axis last; convolutions are unfolded
    spec    its spec, for two axes
    rule, eps   of the scheme, see :func:`pennyweight.core.qparams.choose`
    stats   what the solver asked for, by name: [G, K, K] or [G, K]; rows of the weight fall into G equal runs. Empty
            where the layer saw no data
    tokens  seen
    """

    name: str
    weight: Tensor
    spec: QuantSpec
    rule: str | None = None
    eps: float | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: int = 0


class Solution(NamedTuple):
    """Plain parts of the weight, and what is to be told.

    error, nearest  output error E|(Wq - W) x|^2 of this and of round-to-nearest, where there was data
    note            a sentence for the report, where something went another way than asked
    """

    parts: Parts
    error: float | None = None
    nearest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Solver:
    """Chooses parts for a weight: ``solve(task) -> Solution``.

    needs: names of statistics; without any it runs on weights alone. A layer that saw no data is rounded to nearest.
    wants: names of statistics that it can do without.
    learns: whether it finds the numbers of formats that have none of their own.
    """

    name: ClassVar[str] = ""
    learns: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    @property
    def wants(self) -> tuple[str, ...]:
        return ()

    def solve(self, task: Task) -> Solution:
        raise NotImplementedError


@dataclass(frozen=True)
class Rewrite:
    """Changes a model in place but not its function (to 1e-5): ``apply(model, target, batches) -> notes``.

    target  the parameters that are going to be quantized: name -> scheme
    notes   by parameter name, for the report

    ``check(model, target, batches)`` raises ValueError where the step does not apply to the float model; a recipe asks
    every step before the first changes anything.
    """

    name: ClassVar[str] = ""

    @property
    def needs_data(self) -> bool:
        return True

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Nothing to check by default."""

    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Tuner:
    """Changes numbers of a model that is quantized already, and no byte count: ``tune(model, teacher, batches)``.

    teacher     the model as it was, after rewrites
    Returns notes by parameter name; "" is the whole model. ``check`` as that of :class:`Rewrite`.
    """

    name: ClassVar[str] = ""

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Nothing to check by default."""

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        raise NotImplementedError


ALGORITHMS: dict[str, type[Solver] | type[Rewrite] | type[Tuner]] = {}
_T = TypeVar("_T", bound=type)


def register(name: str) -> Callable[[_T], _T]:
    """Make a Solver, Rewrite or Tuner known by a name."""

    def add(cls: _T) -> _T:
        if name in ALGORITHMS:
            raise ValueError(f"algorithm {name!r} is registered already")
        cls.name = name
        ALGORITHMS[name] = cls
        return cls

    return add
