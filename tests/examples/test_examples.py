"""Each tutorial script runs in a process of its own, as a reader would start it, with warnings as errors.

In one process they would leave their formats, kernels and handlers in the registries of other tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_tutorials import PAGES, ROOT, fences

# As in pyproject.toml: torch 2.13's inductor imports torch.utils.mkldnn, which uses script_method.
WARNINGS = ["-W", "error", "-W", "ignore:`torch.jit.script_method` is:DeprecationWarning"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_script_runs_and_prints_what_its_page_shows(page: Path) -> None:
    script = ROOT / "examples" / f"{page.stem}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, *WARNINGS, str(script)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for fence in fences(page, "text"):
        for line in fence.splitlines():
            assert line.strip() in run.stdout, f"{page.name} shows, but {script.name} does not print: {line}"
