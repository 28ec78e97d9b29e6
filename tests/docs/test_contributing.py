"""The diffs of docs/development/adding.md apply to a copy, their code runs there, and its tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "development" / "adding.md").read_text(encoding="utf-8")
# Heading "Add a ..." -> the conformance tests, and the part of their names that selects the new entry
CONFORMANCE = {
    "number format": ("tests/every/test_formats.py", "e2m2"),
    "solver": ("tests/every/test_solvers.py", "percentile"),
    "kernel": ("tests/every/test_kernels.py", "torch_conv_cast"),
    "codec": ("tests/io/codecs/test_bad_folders.py", "int8_rows"),
    "config": ("tests/every/test_configs.py", "TernaryWeightOnlyConfig"),
}
IMPORTED = "import pennyweight; print(pennyweight.__file__)\n"


def example(thing: str) -> tuple[str, str]:
    """The diff and the code of a section."""
    section = TEXT.partition(f"## Add a {thing}\n")[2].partition("\n## ")[0]
    diffs, codes = (re.findall(rf"^```{kind}\n(.*?)^```$", section, re.S | re.M) for kind in ("diff", "python"))
    assert (len(diffs), len(codes)) == (1, 1), f"one diff and one block of Python in the section on a {thing}"
    return diffs[0], codes[0]


def run(command: list[str], folder: Path, given: str | None = None) -> str:
    """The output of a command in the folder, whose packages are imported. Fails with the output if it fails."""
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    env |= {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # a folder inside a repository is not a part of it
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=folder, env=env, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)[:80]}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_every_section_has_its_conformance_tests() -> None:
    assert re.findall(r"^## Add a (.*)$", TEXT, re.M) == list(CONFORMANCE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("thing", CONFORMANCE)
def test_the_diff_applies_and_works(thing: str, tmp_path: Path) -> None:
    diff, code = example(thing)
    git = shutil.which("git")
    assert git is not None, "git is needed to apply the diffs of docs/development/adding.md; install it"
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("pennyweight", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run([git, "apply", "-"], tmp_path, diff)

    where, *_ = run([sys.executable, "-c", IMPORTED + code], tmp_path).splitlines()
    assert Path(where) == tmp_path / "pennyweight" / "__init__.py"
    tests, entry = CONFORMANCE[thing]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests, "-k", entry]
    run(command, tmp_path)  # pytest also fails if it selects no test
