"""Programs without the native library: one warning at the first use, none at import or if it is switched off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import warnings, sys
from pathlib import Path
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import pennyweight as pw
    from pennyweight.kernels.cpu import library
    library.LIBRARY, library.OFF = Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".off")
    import torch
    at_import = len([w for w in seen if "native CPU kernels" in str(w.message)])
    for _ in range(2):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 16))
        pw.quantize_(model, pw.Int8WeightOnlyConfig())
        assert torch.isfinite(model(torch.randn(3, 64))).all()
    found = [str(w.message) for w in seen if "native CPU kernels" in str(w.message)]
assert at_import == 0, found
print(len(found), library.available(), *found, sep="\\n")
"""


def run(library: Path, native: str | None = None) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "PENNYWEIGHT_NATIVE"}
    env |= {} if native is None else {"PENNYWEIGHT_NATIVE": native}
    root = str(Path(__file__).resolve().parents[3])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    command = [sys.executable, "-c", PROGRAM, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only")
def test_a_missing_library_warns_once_and_names_the_remedy(tmp_path: Path) -> None:
    count, reason, warning = run(tmp_path / "_native.so")
    assert count == "1"
    assert reason in warning
    assert "Install g++ and run `pip install --force-reinstall" in warning


@pytest.mark.skipif(sys.platform != "linux", reason="the library is built on Linux only")
def test_a_library_that_cannot_be_loaded_warns_once(tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_text("not a library")
    count, reason, _ = run(tmp_path / "_native.so")
    assert (count, reason.split(":")[0]) == ("1", "built but cannot be loaded")


def test_switched_off_when_running_or_when_built_does_not_warn(tmp_path: Path) -> None:
    assert run(tmp_path / "_native.so", "0") == ["0", "switched off by PENNYWEIGHT_NATIVE=0"]
    (tmp_path / "_native.off").touch()
    assert run(tmp_path / "_native.so") == ["0", "not built: PENNYWEIGHT_NATIVE=0 when the package was installed"]
