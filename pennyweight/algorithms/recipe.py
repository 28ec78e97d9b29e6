"""Recipes: an ordered list of algorithms, given by names, as data or in a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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
            f"the order of a recipe is rewrites, one solver, tuners; got {', '.join(_text(s) for s in steps)}"
        )
    solvers = [s for s in steps if isinstance(s, Solver)]
    if len(solvers) > 1:
        raise ValueError(f"a recipe has one solver; got {', '.join(_text(s) for s in solvers)}")
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
    if not isinstance(item, str) or not isinstance(options, Mapping):
        raise ValueError(f"a step of a recipe is a name, {{name: options}}, or an algorithm; got {item!r}")
    if item not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {item!r}{_near(item, ALGORITHMS)}; known: {', '.join(sorted(ALGORITHMS))}")
    known = {f.name for f in fields(ALGORITHMS[item])}
    for name in options:
        if name not in known:
            raise ValueError(f"{item} has no option {name!r}{_near(name, known)}; known: {', '.join(sorted(known))}")
    return ALGORITHMS[item](**options)


def _near(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if isinstance(data, Mapping) and set(data) == {"algorithm"}:
        data = data["algorithm"]
    if data is None:
        raise ValueError(f"{path} is empty; expected a list of steps such as [smooth, gptq]")
    return data
