"""A launch after the first one gives the driver what Triton's own launcher gives it; with Triton's driver code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed")
HERE = Path(__file__).resolve().parent
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
# Parameters that are new results at each call
FRESH = {"weight_only": (), "quantize": (1, 2, 3), "product": (5,)}


@pytest.mark.skipif(not shutil.which("gcc"), reason="Triton builds its driver code with gcc")
def test_the_second_launch_is_as_the_first(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", library, HERE / "recording_driver.c"]
    subprocess.run(build, check=True, timeout=60)
    folder, root = str(tmp_path), HERE.parents[2]
    env = {**os.environ, "TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": folder, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.kernels.triton.recording_launches"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) == 6
    for name, (first, second) in found.items():
        assert second["launches"] == first["launches"] + 1, name
        assert second["pointers_looked_up"] == first["pointers_looked_up"], f"{name}: the driver was asked"
        fresh = FRESH[name.split()[0]]
        for i, (a, b) in enumerate(zip(first["recorded"], second["recorded"], strict=True)):
            assert (a == b) is not (i in fresh), f"{name}: parameter {i}"
        for part in ("grid", "threads", "shared", "attributes", "stream"):
            assert first[f"recorded_{part}"] == second[f"recorded_{part}"], f"{name}: {part}"
        assert first["recorded_stream"] == 7
        assert first["recorded_attributes"] == ("ahead" in name or "product" in name), name
