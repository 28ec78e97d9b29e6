"""A device type that no kernel of ours is for: torch's operators compute, and what is said is true."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.kernels.other_device.program import NAME, SCHEMES

SOURCE = Path(__file__).parent / "other_device" / "backend.cpp"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    compiler, root, folder = shutil.which("g++"), Path(torch.__file__).parent, tmp_path_factory.mktemp("other")
    if compiler is None:
        pytest.skip("a backend for torch is written in C++, and there is no g++")
    library = folder / "backend.so"
    options = [
        "-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
        "-DAT_PER_OPERATOR_HEADERS",  # the declarations of all operators would be half of the compile time
    ]  # fmt: skip
    built = subprocess.run(
        [compiler, str(SOURCE), "-o", str(library), *options], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.skip(f"the backend was not compiled: {built.stderr[-500:]}")
    run = forked.run(["-m", "tests.kernels.other_device.program", library, folder])
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantizing_and_products_need_no_kernel(found: dict[str, Any], scheme: str) -> None:
    got = found[scheme]
    assert got["same weight"]
    assert {device.partition(":")[0] for device in got["device"]} == {NAME}
    assert got["layout"] in ("plain", "bits")
    assert got["distance"] < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES)
def test_explain_names_what_runs_and_a_warning_what_is_dequantized(found: dict[str, Any], scheme: str) -> None:
    got = found[scheme]
    assert f"on {NAME}" in got["explain"].splitlines()[0]
    (runs,) = (line.split()[0] for line in got["explain"].splitlines() if line.endswith("RUNS"))
    assert runs in ("torch_int8_cast", "torch_int8_float", "dequantize")
    # said once per process and device type, by the first scheme that is dequantized
    said = [name for name in SCHEMES if any("dequantized at each call" in text for text in found[name]["warnings"])]
    first = next(name for name in SCHEMES if "dequantize        rank  -1  RUNS" in found[name]["explain"])
    assert said == [first]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_and_moves(found: dict[str, Any], scheme: str) -> None:
    got = found[scheme]
    assert got["loaded"]
    assert got["pickled"]
    assert got["loaded there"].startswith(NAME)
    assert max(got["loaded on the CPU"], got["moved there"], got["moved back"]) < 1e-5
