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
FLOORS = {"core": 0, "kernels": 2, "models": 3, "algorithms": 4, "training": 4, "optim": 4}
FLOORS |= {"io": 5, "distributed": 6, "export": 6, "integrations": 6, "compat": 6, "report": 6, "cli": 7}
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
import json, pathlib, sys, time
import torch
start = time.process_time()
import pennyweight
seconds = time.process_time() - start
heavy = [name for name in ("torch._dynamo", "triton", "transformers", "rich", "typer") if name in sys.modules]
pathlib.Path(sys.argv[1]).write_text(json.dumps([seconds, heavy, torch.cuda.is_initialized()]))
"""


def test_import_is_light_and_silent(tmp_path: Path) -> None:
    seconds = []
    for _ in range(8):  # other processes on the machine cost CPU time too
        out = tmp_path / "probe.json"
        run = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROBE, str(out)], capture_output=True, text=True, check=False
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
        took, heavy, cuda = json.loads(out.read_text())
        assert heavy == []
        assert not cuda
        if took < 0.1:
            return
        seconds.append(took)
    pytest.fail(f"import pennyweight took {seconds} s of CPU time on top of import torch")
