"""Imports run only downward, and importing the package is light and silent."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pennyweight
from tests import forked

PACKAGE = Path(pennyweight.__file__).parent
FLOORS = {"support": 0, "core": 1, "kernels": 2, "distributed": 3, "planning": 4, "algorithms": 5, "quantize": 6}
FLOORS |= {"inference": 7, "training": 7, "optim": 7, "io": 8}
FLOORS |= {"export": 9, "integrations": 9, "report": 9, "cli": 10}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(["pennyweight", *(parts[:-1] if parts[-1] == "__init__" else parts)])


MODULES = {module_name(file): file for file in FILES}


def imported_modules(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, absolute, wherever in the file the import stands."""
    here = ["pennyweight", *file.with_suffix("").parts]
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*here[: len(here) - node.level], node.module or ""]).rstrip(".")
                if node.level
                else node.module
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8"))


def named_modules(file: Path) -> Iterator[str]:
    """Modules of the package that strings of a file name, as for import_module: absolute, or with leading dots."""
    tree, here = parse(file), ["pennyweight", *file.with_suffix("").parts]
    blocks = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, blocks) and ast.get_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value.lstrip(".")
            dots = len(node.value) - len(text)
            name = ".".join([*here[: len(here) - dots], text]) if dots else text
            if name in MODULES and name != "pennyweight":
                yield name


@pytest.mark.parametrize("file", [file for file in FILES if len(file.parts) > 1], ids=str)
def test_a_file_imports_its_own_folder_and_lower_floors(file: Path) -> None:
    own, strings = file.parts[0], set(named_modules(file))
    for name in {*imported_modules(file), *strings}:
        top, _, rest = name.partition(".")
        folder = rest.split(".")[0]
        if top != "pennyweight" or folder == own or (own, folder) == ("cli", "startup"):
            continue  # commands start the package, see pennyweight/startup.py
        assert folder in FLOORS, f"{file}: {name} is a public name; import it from the folder that defines it"
        assert FLOORS[folder] < FLOORS[own], f"{file} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[folder]})"


SUPPORT = [file for file in FILES if file.parts[0] == "support"]


@pytest.mark.parametrize("file", SUPPORT, ids=str)
def test_support_imports_nothing_of_ours_and_no_tensors(file: Path) -> None:
    """Its own files apart: neither another folder, nor torch or numpy."""
    tops = {name.partition(".")[0] for name in imported_modules(file) if not name.startswith("pennyweight.support.")}
    assert not tops & {"pennyweight", "torch", "numpy"}
    assert all(name.startswith("pennyweight.support.") for name in named_modules(file))


def import_graph() -> dict[str, set[str]]:
    """Module -> modules it imports or names. A name that no file has is that of a package (``__init__``)."""
    graph: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        names = {*imported_modules(file), *named_modules(file)}
        found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in found if name in MODULES and name != module}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that import each other (strongly connected components of more than one, by Kosaraju)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(module: str, edges: dict[str, set[str]], out: list[str]) -> None:
        seen.add(module)
        for other in sorted(edges[module] - seen):
            if other not in seen:
                visit(other, edges, out)
        out.append(module)

    for module in graph:
        if module not in seen:
            visit(module, graph, order)
    back: dict[str, set[str]] = {module: {m for m in graph if module in graph[m]} for module in graph}
    seen.clear()
    found = []
    for module in reversed(order):
        if module not in seen:
            found.append([])
            visit(module, back, found[-1])
    return [sorted(group) for group in found if len(group) > 1]


def test_modules_do_not_import_each_other() -> None:
    """Imports inside functions count, and so do strings that name a module."""
    assert cycles(import_graph()) == []


def test_every_file_has_a_floor_and_a_name() -> None:
    assert {file.parts[0] for file in FILES if len(file.parts) > 1} <= FLOORS.keys()
    assert {str(file) for file in FILES if len(file.parts) == 1} <= {"__init__.py", "__main__.py", "startup.py"}
    assert [str(file) for file in FILES if file.stem == "utils"] == []


def test_dir_lists_what_users_call() -> None:
    names = [name for name in dir(pennyweight) if not name.startswith("_")]
    assert {"quantize_", "save", "PennyweightConfig"} <= set(names)
    assert not {"os", "sys", "logging", "Any", "TYPE_CHECKING", "import_module", "annotations"} & set(names)
    assert "quantize_" in (pennyweight.__doc__ or "").split("logging")[0]


PROBE = """
import json, pathlib, sys
import torch
before = set(sys.modules)
import pennyweight
new = sorted(set(sys.modules) - before)
pathlib.Path(sys.argv[1]).write_text(json.dumps([new, torch.cuda.is_initialized()]))
"""


def test_import_is_light_and_silent(tmp_path: Path) -> None:
    """Only support, core and kernels on top of torch; what that takes is measured by benchmarks/import_time.py."""
    out = tmp_path / "probe.json"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, str(out)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    new, cuda = json.loads(out.read_text())
    assert not cuda
    own = ("pennyweight.support", "pennyweight.core", "pennyweight.kernels")
    prefixes = tuple(f"{folder}." for folder in own)
    allowed = ("pennyweight", "pennyweight.startup", *own)
    assert [m for m in new if m not in allowed and not m.startswith(prefixes)] == []


WITHOUT_GPU = """
import sys
import torch
import torch.nn.functional as F
before = set(sys.modules)
import pennyweight as pw
def gpu_modules():
    new = sorted(set(sys.modules) - before)
    return [m for m in new if m.startswith(("pennyweight.kernels.triton", "pennyweight.kernels.torch_gpu", "triton"))]
print(gpu_modules())
for config in (pw.Int4WeightOnlyConfig(group_size=32), pw.Int8DynamicActivationInt8WeightConfig()):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Conv2d(16, 16, 3), torch.nn.Embedding(32, 64))
    pw.quantize_(model, config)
    F.linear(torch.ones(2, 64), model[0].weight, model[0].bias)
print(gpu_modules())
names = [kernel.name for kernel in pw.kernels.kernels("linear")]
print({"triton_weight_only", "triton_int8", "torch_scaled_mm"} <= set(names), "triton" in sys.modules)
"""


def test_files_for_gpus_are_imported_with_the_first_gpu_case() -> None:
    """A CPU program loads none of them; listing the kernels does, and still not triton itself."""
    run = forked.run(["-c", WITHOUT_GPU])
    assert run.stdout.splitlines() == ["[]", "[]", "True False"], run.stderr[-3000:]


BY_CASE = """
import os
import sys
import torch
import pennyweight as pw
from pennyweight.core.layouts import get_layout, layouts
from pennyweight.kernels import Case, select
def loaded():
    return "pennyweight.kernels.triton.weight_only" in sys.modules
assert not loaded()
for how in sys.argv[1:-1]:  # forked: none sees what another has loaded
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    how = sys.argv[-1]
spec = pw.QuantSpec(pw.get_format("int4"), (64,))
if how == "select":
    name = select("linear", Case(spec, None, (64, 128), torch.bfloat16, "cuda:sm_90"), any_layout=True).name
    print(loaded(), name)
elif how == "layout":
    print(loaded(), get_layout("gpu").name, loaded())
elif how == "names":
    try:
        get_layout("gpus")
    except ValueError as error:
        print(loaded(), "torch_blocks_gpu" in str(error), "torch_int4_gpu" in str(error))
elif how == "layouts":
    print({"gpu", "torch_blocks_gpu", "torch_int4_gpu"} <= {layout.name for layout in layouts()})
else:
    model = torch.nn.Sequential(torch.nn.Linear(128, 64)).bfloat16()
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=64))
    table = pw.kernels.explain(torch.bfloat16, model[0].weight, device="cuda:sm_90")
    print(loaded(), next(name for name, _, verdict in table.rows if verdict == "RUNS"))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_whoever_asks_for_a_gpu_finds_all_rows_and_layouts() -> None:
    printed = {
        "select": "True triton_weight_only", "layout": "False gpu True", "names": "False True True",
        "layouts": "True", "explain": "True triton_weight_only",
    }  # fmt: skip
    run = forked.run(["-c", BY_CASE, *printed])
    assert run.stdout.splitlines() == [*printed.values()], run.stderr[-3000:]
