"""docs/algorithms: every algorithm has a page, links lead somewhere, and the solver of one's own runs as it stands."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms import ALGORITHMS
from pennyweight.algorithms.recipe import read
from tests.docs.test_tutorials import ROOT, fences

FOLDER = ROOT / "docs" / "algorithms"
PAGES = sorted(FOLDER.glob("*.md"))
README = FOLDER / "README.md"


def test_every_solver_has_a_page_and_a_row() -> None:
    from pennyweight.algorithms import Solver

    text = README.read_text(encoding="utf-8")
    for name, cls in ALGORITHMS.items():
        if issubclass(cls, Solver) and cls.__module__.startswith("pennyweight."):
            assert (FOLDER / f"{name}.md").exists()
            assert f"[`{name}`]({name}.md)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_recipe_file_is_one(tmp_path: Path) -> None:
    (text,) = fences(README, "yaml")
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    assert read(path) == read({"gptq": {"damping": 0.05, "grids": ["scheme", 0.9, "mse"], "sweeps": 2}})


def test_the_solver_of_ones_own_runs() -> None:
    code = next(text for text in fences(README, "python") if "QuietColumns" in text)
    assert len([line for line in code.split("class QuietColumns")[1].splitlines() if line.strip()]) <= 15
    namespace: dict[str, object] = {"__name__": "solver_of_ones_own"}
    exec(compile(code, str(README), "exec", dont_inherit=True), namespace)
    try:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(32, 8)), torch.randn(16, 32)
        x[:, 3] = 0
        with torch.no_grad():
            model[0].weight[:, 3] = 10.0
        wanted = model(x)
        report = pw.quantize_(model, pw.Int8WeightOnlyConfig(), calibration=[x], algorithm="quiet_columns")
        assert "quiet_columns" in report.config
        assert (model(x) - wanted).abs().max() < 0.02  # a range of 10 would be off by 0.1
        assert str(read({"quiet_columns": {"share": 0.1}})) == "quiet_columns(share=0.1)"
    finally:
        del ALGORITHMS["quiet_columns"]
