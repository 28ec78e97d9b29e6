"""Recipes: an ordered list of algorithms, given by names, as data or in a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..support.arguments import did_you_mean, show
from ..support.errors import ArgumentTypeError
from .base import ALGORITHMS, Rewrite, Solver, Tuner
from .solvers.rtn import Nearest

Step = Solver | Rewrite | Tuner


@dataclass(frozen=True)
class Recipe:
    """Rewrites first, then one solver, then tuners."""

    rewrites: tuple[Rewrite, ...]
    solver: Solver
    tuners: tuple[Tuner, ...]

    @property
    def needs_data(self) -> bool:
        return bool(self.solver.needs or self.tuners or any(r.needs_data for r in self.rewrites))

    def __str__(self) -> str:
        return " + ".join(_text(step) for step in (*self.rewrites, self.solver, *self.tuners))


def read(algorithm: Any) -> Recipe:
    """Parse a recipe: an algorithm object, a name, ``{name: {option: value}}``, a list of these, or the path of a YAML
    file. Raises ValueError for an unknown name or option, for two solvers, and for steps in the wrong order.
    """
    if isinstance(algorithm, Recipe):
        return algorithm
    if isinstance(algorithm, (str, Path)) and str(algorithm).endswith((".yaml", ".yml")):
        algorithm = _from_yaml(Path(algorithm))
    steps = [_step(item) for item in (algorithm if isinstance(algorithm, (list, tuple)) else [algorithm])]
    order = [_rank(s) for s in steps]
    if order != sorted(order):
        raise ValueError(
            f"the order of a recipe is rewrites, one solver, tuners; got {', '.join(map(_text, steps))}; write "
            f"{', '.join(map(_text, sorted(steps, key=_rank)))}"
        )
    solvers = [s for s in steps if isinstance(s, Solver)]
    if len(solvers) > 1:
        raise ValueError(f"a recipe has one solver; got {', '.join(map(_text, solvers))}; keep one of them")
    return Recipe(
        tuple(s for s in steps if isinstance(s, Rewrite)),
        solvers[0] if solvers else Nearest(),
        tuple(s for s in steps if isinstance(s, Tuner)),
    )


def _rank(step: Step) -> int:
    return 0 if isinstance(step, Rewrite) else 1 if isinstance(step, Solver) else 2


def _step(item: Any) -> Step:
    if isinstance(item, (Solver, Rewrite, Tuner)):
        return item
    options: Mapping[str, Any] = {}
    if isinstance(item, Mapping):
        if len(item) != 1:
            raise ValueError(f"a step of a recipe is one name with its options, got {dict(item)!r}")
        item, options = next(iter(item.items()))
        options = options or {}
    if isinstance(item, type) and issubclass(item, (Solver, Rewrite, Tuner)):
        name = item.__name__
        raise ArgumentTypeError(f"algorithm must be an instance, got the class {name}; write {name}()")
    if isinstance(item, str) and not isinstance(options, Mapping):
        raise ArgumentTypeError(
            f"the options of {item} must be a mapping, {{'{item}': {{option: value}}}}, got {show(options)}"
        )
    if not isinstance(item, str):
        raise ArgumentTypeError(
            f"algorithm must be a name such as 'gptq', {{name: options}}, an algorithm, or a list of these; got "
            f"{show(item)}"
        )
    if item not in ALGORITHMS:
        guess = did_you_mean(item, ALGORITHMS, 1, 0.6)
        raise ValueError(f"unknown algorithm {item!r}{guess}; known: {', '.join(sorted(ALGORITHMS))}")
    known = {f.name for f in fields(ALGORITHMS[item])}
    for name in options:
        if name not in known:
            raise ValueError(
                f"{item} has no option {name!r}{did_you_mean(name, known, 1, 0.6)}; known: {', '.join(sorted(known))}"
            )
    return ALGORITHMS[item](**options)


def _text(step: Step) -> str:
    given = [
        f"{f.name}={getattr(step, f.name)!r}" for f in fields(step) if getattr(step, f.name) != f.default
    ]  # every option has a default
    return f"{step.name}({', '.join(given)})" if given else step.name


def _from_yaml(path: Path) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            f"{path}: reading YAML needs PyYAML; pip install pyyaml, or pass the recipe as a list"
        ) from error
    if not path.is_file():
        raise FileNotFoundError(
            f"algorithm={str(path)!r}: there is no such file; pass the path of a YAML file, or a name such as 'gptq'"
        )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "is not text in UTF-8"
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{path}: {where}{problem}; expected a list of steps such as [smooth, gptq]") from error
    if isinstance(data, Mapping) and set(data) == {"algorithm"}:
        data = data["algorithm"]
    if data is None:
        raise ValueError(f"{path} is empty; expected a list of steps such as [smooth, gptq]")
    return data
