"""The command starts without torch; everything else that imports the package gets all of it, in any order."""

import gc
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.cli.output import collection_paused

HEAVY = {"torch", "numpy", "rich", "transformers", "huggingface_hub", "jinja2"}
SCRIPT = "import sys\nfrom pennyweight.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def python(*arguments: Any, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


def imported(stderr: str) -> set[str]:
    """Top-level packages in the output of -X importtime."""
    lines = [line for line in stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The command as pip installs it."""
    (tmp_path / "bin").mkdir()
    file = tmp_path / "bin" / "pennyweight"
    file.write_text(SCRIPT)
    return file


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (["--version"], {}, f"pennyweight {pw.__version__}\n"),
        (["-V"], {}, f"pennyweight {pw.__version__}\n"),
        (["--help"], {}, "Make files:"),
        (["-h"], {}, "Make files:"),
        (["quantize", "--help"], {}, "8da4w "),
        (["inspect", "-h"], {}, "--all"),
        (["doctor", "--help"], {}, "--bench"),
        ([], {"_PENNYWEIGHT_COMPLETE": "complete_bash", "COMP_WORDS": "pennyweight qu", "COMP_CWORD": "1"}, "quantize"),
        ([], {"_PENNYWEIGHT_COMPLETE": "source_bash"}, "complete -o default"),
        (["--show-completion", "zsh"], {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}, "#compdef pennyweight"),
    ],
    ids=" ".join,
)
def test_no_torch(arguments: list[str], env: dict[str, str], expected: str, script: Path) -> None:
    for start in (["-m", "pennyweight"], [script]):
        run = python("-X", "importtime", *start, *arguments, **env)
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout
        assert imported(run.stderr) & {"pennyweight", "typer"} == {"pennyweight", "typer"}
        assert not imported(run.stderr) & HEAVY


def test_it_starts_where_torch_is_broken(tmp_path: Path, script: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    path = os.pathsep.join([str(tmp_path), str(Path(pw.__file__).parents[1])])
    assert python(script, "--version", PYTHONPATH=path).stdout == f"pennyweight {pw.__version__}\n"
    for run in (python("-c", "import pennyweight", PYTHONPATH=path), python(script, "inspect", "x", PYTHONPATH=path)):
        assert run.returncode == 1
        assert run.stderr.endswith("ImportError: libcudart.so is missing\n")


def test_a_command_has_all_of_the_package(script: Path, tmp_path: Path) -> None:
    """Also the readers that higher layers register: of torchao, of models of transformers."""
    pw.save({"w": torch.randn(4, 4)}, tmp_path / "small")
    run = python("-X", "importtime", script, "inspect", tmp_path / "small")
    assert run.returncode == 0, run.stderr
    names = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert {"pennyweight.startup", "pennyweight.kernels", "torch"} <= names
    assert "transformers" not in names


def test_a_child_process_of_the_command_has_it_too(tmp_path: Path) -> None:
    """A spawned process has the script's name in sys.argv, but unpickles tensors before any command runs."""
    file = tmp_path / "pennyweight"
    file.write_text(
        "from pennyweight.cli import main\n"
        "import sys\n"
        "before = 'torch' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    from concurrent.futures import ProcessPoolExecutor\n"
        "    from multiprocessing import get_context\n"
        "    with ProcessPoolExecutor(1, get_context('spawn')) as pool:\n"
        "        there = pool.submit(eval, \"'pennyweight.startup' in __import__('sys').modules\").result()\n"
        "    print(before, there)\n"
    )
    run = python(file)
    assert (run.stdout, run.returncode) == ("False True\n", 0), run.stderr


def test_names_of_the_package_in_the_command(tmp_path: Path) -> None:
    """A script of that name is not the command, but what it uses is there."""
    file = tmp_path / "pennyweight"
    file.write_text(
        "import pennyweight as pw, sys\n"
        "assert 'torch' not in sys.modules and 'Format' in dir(pw)\n"
        "assert not hasattr(pw, 'nothing')\n"
        "print(pw.get_format('int4').name, 'pennyweight.startup' in sys.modules)\n"
    )
    run = python(file)
    assert run.stdout == "int4 True\n", run.stderr


# -- imports of the package, each in a new process ---------------------------------------------------------------------

ORDERS = {
    "before torch": "import pennyweight, torch; w = torch.load(path, weights_only=True)",
    "after torch": "import torch, pennyweight; w = torch.load(path, weights_only=True)",
    "not at all": "import torch; w = torch.load(path, weights_only=False)",
    "a folder of it": "import pennyweight.optim, torch; w = torch.load(path, weights_only=True)",
    "star": "from pennyweight import *; import torch; w = torch.load(path, weights_only=True)",
    "reload": "import pennyweight, importlib, sys; hooks = list(sys.meta_path); importlib.reload(pennyweight)\n"
    "assert sys.meta_path == hooks\nimport torch; w = torch.load(path, weights_only=True)",
    "torchao's names": "import pennyweight_torchao; pennyweight_torchao.install()\n"
    "import torchao.quantization, torch; w = torch.load(path, weights_only=True)",
    "threads": "import threading\n"
    "names = ['pennyweight', 'torch', 'pennyweight', 'torch', 'pennyweight']\n"
    "errors, barrier = [], threading.Barrier(len(names))\n"
    "threading.excepthook = lambda found: errors.append(found.exc_value)\n"
    "def load(name):\n    barrier.wait(); __import__(name)\n"
    "threads = [threading.Thread(target=load, args=(name,)) for name in names]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\nassert errors == [], errors\n"
    "import torch; w = torch.load(path, weights_only=True)",
}
CHECK = """
import torch.nn.functional as F, sys
assert 'pennyweight.kernels' in sys.modules
x = torch.ones(2, 64)
close = (F.linear(x, w) - F.linear(x, w.dequantize())).abs().max()
import pennyweight as pw
assert pw.AffineQuantizedTensor is type(w) and pw.__version__
print(float(close) < 1e-3, pw.fallbacks() == {})
"""


# The others take the same ways, and adapters/torchao/tests/test_names.py installs torchao's names
QUICK = ("before torch", "not at all", "reload", "threads")


@pytest.mark.parametrize("order", [o if o in QUICK else pytest.param(o, marks=pytest.mark.exhaustive) for o in ORDERS])
def test_a_weight_loads_and_runs_whatever_was_imported_first(order: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 32, bias=False)
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    torch.save(model.weight.data, tmp_path / "w.pt")
    run = python("-W", "ignore", "-c", f"path = {str(tmp_path / 'w.pt')!r}\n{ORDERS[order]}\n{CHECK}")
    assert (run.stdout, run.stderr) == ("True True\n", "")


def test_garbage_is_collected_after_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen  # nothing was imported
    try:
        with collection_paused():
            monkeypatch.setitem(sys.modules, "new_module", types.ModuleType("new_module"))
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.freeze()  # as conftest.py left it
