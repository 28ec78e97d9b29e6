"""Recipes: the same steps from names, data and YAML; refused with the remedy where they have no meaning."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from pennyweight.algorithms import ALGORITHMS, Rewrite, Tuner
from pennyweight.algorithms.recipe import Recipe, read
from pennyweight.algorithms.solvers.gptq import GPTQ, Auto
from pennyweight.algorithms.solvers.rtn import Nearest


@dataclass(frozen=True)
class Turn(Rewrite):
    """A rewrite of one's own, not registered."""

    name = "turn"  # type: ignore[misc]
    by: float = 1.0

    def apply(self, model: nn.Module, target: tuple[str, ...], batches: Any) -> dict[str, str]:
        return {}


@dataclass(frozen=True)
class Tune(Tuner):
    name = "tune"  # type: ignore[misc]

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        return {}


def test_names_data_and_objects_are_the_same() -> None:
    wanted = Recipe((), GPTQ(damping=0.05), ())
    for given in (
        GPTQ(damping=0.05), {"gptq": {"damping": 0.05}}, [{"gptq": {"damping": 0.05}}], [GPTQ(damping=0.05)], wanted,
    ):  # fmt: skip
        assert read(given) == wanted
    assert read("auto").solver == Auto()
    assert read([]) == Recipe((), Nearest(), ())
    assert read({"gptq": None}).solver == GPTQ()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_name_is_a_recipe(name: str) -> None:
    recipe = read(name)
    assert str(recipe) in (name, f"{name} + nearest", f"nearest + {name}")
    assert hash(recipe) == hash(read([name]))


def test_text_shows_what_was_given() -> None:
    assert str(read({"gptq": {"damping": 0.05, "sweeps": 2}})) == "gptq(damping=0.05, sweeps=2)"
    assert str(read([Turn(2.0), "gptq", Tune()])) == "turn(by=2.0) + gptq + tune"
    assert read([Turn(), Tune()]).solver == Nearest()


def test_what_needs_data() -> None:
    assert read("gptq").needs_data
    assert read([Turn(), "nearest"]).needs_data
    assert read(["nearest", Tune()]).needs_data
    assert not read("nearest").needs_data
    assert not read("mse").needs_data
    assert not read("hqq").needs_data


def test_yaml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("- gptq:\n    damping: 0.05\n    grids: [scheme, 0.9]\n")
    assert read(str(path)) == read(path) == read({"gptq": {"damping": 0.05, "grids": ["scheme", 0.9]}})
    path.write_text("algorithm: mse\n")
    assert read(path) == read("mse")
    path.write_text("algorithm:\n  - hqq: {norm: 0.5}\n")
    assert read(path) == read({"hqq": {"norm": 0.5}})
    path.write_text("")
    with pytest.raises(ValueError, match=r"recipe\.yaml is empty; expected a list of steps"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read("nowhere.yml")


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("!!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="line 1: could not determine a constructor"):
        read(path)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("gptqq", r"unknown algorithm 'gptqq' \(did you mean 'gptq'\?\); known: auto, "),
        ({"gptq": {"dampening": 0.1}}, r"gptq has no option 'dampening' \(did you mean 'damping'\?\); known: "),
        ({"gptq": {}, "mse": {}}, "a step of a recipe is one name with its options"),
        ({"gptq": 3}, "the options of gptq must be a mapping, .* got 3"),
        ([3], "algorithm must be a name such as .* got 3"),
        (["gptq", "mse"], "a recipe has one solver; got gptq, mse"),
        (["gptq", Turn()], r"the order of a recipe is rewrites, one solver, tuners; got gptq, turn"),
        ([Tune(), "gptq"], r"rewrites, one solver, tuners"),
        ({"gptq": {"damping": 2}}, "damping must be between 0 and 1, got 2"),
        ({"gptq": {"grids": []}}, "grids must name at least one"),
        ({"hqq": {"norm": 3}}, "hqq: norm must be above 0 and at most 2"),
    ],
)
def test_what_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read(given)
