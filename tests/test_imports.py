"""Imports run only downward, and importing the package is light and silent."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pennyweight

PACKAGE = Path(pennyweight.__file__).parent
FLOORS = {"core": 0, "kernels": 2, "planning": 4, "algorithms": 5, "quantize": 6, "training": 7, "optim": 7, "io": 8}
FLOORS |= {"distributed": 9, "export": 9, "integrations": 9, "compat": 9, "report": 9, "cli": 10}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imported_modules(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, absolute, wherever in the file the import stands."""
    here = ["pennyweight", *file.with_suffix("").parts]
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*here[: len(here) - node.level], node.module or ""]).rstrip(".")
                if node.level
                else node.module
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", [file for file in FILES if len(file.parts) > 1], ids=str)
def test_a_file_imports_its_own_folder_and_lower_floors(file: Path) -> None:
    own = file.parts[0]
    for name in imported_modules(file):
        top, _, rest = name.partition(".")
        folder = rest.split(".")[0]
        if top != "pennyweight" or folder in (own, "__version__"):
            continue
        assert folder in FLOORS, f"{file}: {name} is a public name; import it from the folder that defines it"
        assert FLOORS[folder] < FLOORS[own], f"{file} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[folder]})"


def test_every_file_has_a_floor_and_a_name() -> None:
    assert {file.parts[0] for file in FILES if len(file.parts) > 1} <= FLOORS.keys()
    assert {str(file) for file in FILES if len(file.parts) == 1} <= {"__init__.py", "__main__.py"}
    assert [str(file) for file in FILES if file.stem == "utils"] == []


PROBE = """
import json, pathlib, sys
import torch
before = set(sys.modules)
import pennyweight
new = sorted(set(sys.modules) - before)
pathlib.Path(sys.argv[1]).write_text(json.dumps([new, torch.cuda.is_initialized()]))
"""


def test_import_is_light_and_silent(tmp_path: Path) -> None:
    """Nothing but core and kernels on top of torch; what that takes is measured by benchmarks/import_time.py."""
    out = tmp_path / "probe.json"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, str(out)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    new, cuda = json.loads(out.read_text())
    assert not cuda
    own = ("pennyweight", "pennyweight.core", "pennyweight.kernels")
    assert [m for m in new if m not in own and not m.startswith(("pennyweight.core.", "pennyweight.kernels."))] == []
