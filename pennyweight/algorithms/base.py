"""Base classes of algorithms: a Solver quantizes one weight, a Rewrite changes the weights of a model but not its
function, a Tuner trains a quantized model.

Each is a frozen dataclass, registered by name, whose fields are its options, so that a recipe can be plain data:
``"gptq"``, ``{"gptq": {"damping": 0.05}}``, ``["rotate", "smooth", "gptq"]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from ..core import blocks
from ..core.model_arguments import CheckedFields
from ..core.numerics import Parts
from ..core.spec import QuantSpec
from ..planning.scheme import Scheme


@dataclass(frozen=True)
class Task:
    """One weight to quantize.

    weight  float32 [N, K], contracted axis last; convolutions are unfolded
    spec    spec of the two-dimensional weight
    rule, eps   of the scheme, see :func:`pennyweight.core.qparams.choose`
    stats   requested statistics by name: [G, K, K] or [G, K]; the rows of the weight form G equal groups. Empty if
            no calibration data reached the layer
    tokens  number of calibration tokens
    patches the inputs are patches of a convolution's input, which overlap
    """

    name: str
    weight: Tensor
    spec: QuantSpec
    rule: str | None = None
    eps: float | None = None
    stats: Mapping[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    patches: bool = False


class Solution(NamedTuple):
    """Plain parts of the weight, its error, and a note for the report.

    error, nearest  output error E|(Wq - W) x|^2 of this solution and of round-to-nearest; None without data
    note            a sentence for the report if the solver did something other than requested
    """

    parts: Parts
    error: float | None = None
    nearest: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Solver(CheckedFields):
    """Quantizes one weight: ``solve(task) -> Solution``.

    needs: required statistics; empty: the solver needs no data. Layers that no data reaches are rounded to nearest.
    wants: optional statistics.
    learns: whether it learns the table of values of formats with a learned table.
    """

    name: ClassVar[str] = ""
    learns: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    @property
    def wants(self) -> tuple[str, ...]:
        return ()

    @property
    def copies(self) -> int:
        """For memory limits: how many float32 arrays of the size of the rows that are solved at once are held, with
        room to spare. At once: ``block_search.CHUNK`` elements; a solver that takes large weights whole needs more.
        """
        return 8

    def solve(self, task: Task) -> Solution:
        raise NotImplementedError


@dataclass(frozen=True)
class Rewrite(CheckedFields):
    """Changes a model in place but not its function (to 1e-5): ``apply(model, target, batches) -> notes``.

    target  the parameters that will be quantized: name -> scheme
    notes   by parameter name, for the report

    ``check(model, target, batches)`` raises ValueError if the step does not apply to the float model. A recipe checks
    every step before the first one changes the model.
    """

    name: ClassVar[str] = ""

    @property
    def needs_data(self) -> bool:
        return True

    def needs_memory(self) -> str:
        """Why the float model must be in memory; "": its weights may be in files."""
        return ""

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Nothing to check by default."""

    def apply(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> dict[str, str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Tuner(CheckedFields):
    """Trains values of a quantized model without changing its size: ``tune(model, teacher, batches)``.

    teacher     the float model, after rewrites
    Returns notes by parameter name; "" is the whole model. ``check`` works as in :class:`Rewrite`.
    """

    name: ClassVar[str] = ""

    def needs_memory(self) -> str:
        """As in :class:`Rewrite`."""
        return "it trains all weights at once"

    def check(self, model: nn.Module, target: Mapping[str, Scheme | None], batches: Any) -> None:
        """Nothing to check by default."""

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        raise NotImplementedError


ALGORITHMS: dict[str, type[Solver] | type[Rewrite] | type[Tuner]] = {}
_T = TypeVar("_T", bound=type)


def register(name: str) -> Callable[[_T], _T]:
    """Class decorator: register a Solver, Rewrite or Tuner under a name. Raises ValueError if the name is taken."""

    def add(cls: _T) -> _T:
        if name in ALGORITHMS:
            raise ValueError(f"algorithm {name!r} is already registered")
        cls.name = name
        ALGORITHMS[name] = cls
        return cls

    return add


# -- weights of any rank as matrices [outputs, inputs] -----------------------------------------------------------------


def as_matrix(x: Tensor, unfolded: bool) -> Tensor:
    """[O, I, *kernel] as [O, I * kernel] where ``unfolded`` (a convolution), else [.., N, K] as [.. * N, K]."""
    return x.flatten(1) if unfolded else x.reshape(-1, x.shape[-1])


def flat_spec(spec: QuantSpec, shape: Sequence[int], unfolded: bool) -> QuantSpec | None:
    """The spec of the matrix from :func:`as_matrix`, or None if its blocks or nested scales cannot be flattened."""
    spec = spec.with_(layout="plain")
    if len(shape) == 2:
        return spec
    if unfolded and shape[-1] % spec.format.dim:  # codes end with the last axis
        return None
    if len(shape) < 2 or any(isinstance(kind, QuantSpec) for kind in (spec.scale, spec.offset)):
        return None
    sizes = blocks.resolve(spec.block, shape)
    if spec.block is None:
        return spec
    if not unfolded:
        return spec.with_(block=(1, sizes[-1])) if set(sizes[:-1]) == {1} else None
    rows, *rest = sizes
    # A block is contiguous in the flattened axis if it covers all axes after the one it splits
    cut = next((i for i, b in enumerate(rest) if b != 1), len(rest) - 1)
    if any(b != n for b, n in zip(rest[cut + 1 :], shape[2 + cut :], strict=True)) or shape[1 + cut] % rest[cut]:
        return None
    return spec.with_(block=(rows, math.prod(rest)))


def one_of_stack(spec: QuantSpec) -> QuantSpec:
    """The spec of one matrix of a stack [experts, N, K] of which the spec quantizes each on its own."""

    def inner(kind: Any) -> Any:
        return one_of_stack(kind) if isinstance(kind, QuantSpec) else kind

    block = None if spec.block is None else spec.block[-2:]
    return spec.with_(layout="plain", block=block, scale=inner(spec.scale), offset=inner(spec.offset))


def unflatten(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Reshape the parts of the matrix to those of a weight of ``shape`` under its own spec."""
    if len(shape) == 2:
        return parts
    part_shape, stored = blocks.counts(spec.block, shape), spec.codes_shape(shape)

    def part(p: Tensor | None) -> Tensor | None:
        return None if p is None else p.reshape(part_shape)

    return parts._replace(
        codes=parts.codes.reshape(stored),
        scale=part(parts.scale),
        zero_point=part(parts.zero_point),
        offset=part(parts.offset),
    )
