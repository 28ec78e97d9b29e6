"""The adapter stands on the package: nothing there names it, and no modules of the adapter import each other."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pennyweight
import pennyweight_torchao

PACKAGE = Path(pennyweight.__file__).parent
ADAPTER = Path(pennyweight_torchao.__file__).parent
MODULES = {
    ".".join(("pennyweight_torchao", *file.relative_to(ADAPTER).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in ADAPTER.rglob("*.py")
}


def imported(module: str, file: Path) -> Iterator[str]:
    """Modules of the adapter that a file imports, also inside functions."""
    here = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_two_modules_import_each_other() -> None:
    graph = {
        module: {name for name in imported(module, file) if name in MODULES and name != module}
        for module, file in MODULES.items()
    }
    packages = {module for module, file in MODULES.items() if file.stem == "__init__"}
    for module in graph:  # `from . import name` names the package, whose own imports run before
        graph[module] -= packages
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_package_imports_nothing_of_the_adapter() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in ("pennyweight_torchao", "torchao") for name in names), file
