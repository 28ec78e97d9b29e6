"""The examples in docstrings run and print what they show."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "pennyweight"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "\n    >>> " in path.read_text(encoding="utf-8")]
# The functions that most programs call: each has an example
SHOWN = {
    "quantize_", "plan", "save", "load", "open", "convert", "search", "recommend", "explain", "fuse_",
    "freeze_", "compare", "QATConfig",
}  # fmt: skip


def examples(path: Path) -> list[doctest.DocTest]:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name))
    return [test for test in found if test.examples]


def with_examples(path: Path) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    nodes = (n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, kinds))
    return {node.name for node in nodes if ">>> " in (ast.get_docstring(node) or "")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_examples_run(path: Path) -> None:
    found = examples(path)
    assert {test.name.rpartition(".")[2] for test in found} >= with_examples(path)
    for test in found:
        lines: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(test, out=lines.append)
        assert result.attempted == len(test.examples)
        assert not result.failed, "".join(lines)


def test_the_most_used_functions_have_examples() -> None:
    assert set().union(*map(with_examples, FILES)) >= SHOWN
