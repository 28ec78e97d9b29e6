"""Programs without the native library: one warning at the first use, none at import or if it is switched off."""

import os
import sys
from pathlib import Path

import pytest

from pennyweight.kernels.cpu import library as loaded
from tests import forked

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


FEATURES = {  # names in /proc/cpuinfo of what each instruction set needs
    "avx2": {"avx2", "fma"},
    "avx_vnni": {"avx2", "fma", "avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx512_bf16": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512vbmi"},
    "neon_dotprod": {"asimddp"},
    "neon_i8mm": {"asimddp", "i8mm"},
}


def run(library: Path, native: str | None = None) -> list[str]:
    env = {k: v for k, v in os.environ.items() if k != "PENNYWEIGHT_NATIVE"}
    env |= {} if native is None else {"PENNYWEIGHT_NATIVE": native}
    root = str(Path(__file__).resolve().parents[3])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    command = ["-c", PROGRAM, str(library)]
    done = forked.run(command, env=env)
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


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or loaded.available() is not True, reason="Linux with the library"
)
def test_the_instruction_sets_are_those_that_the_kernel_reports() -> None:
    line = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith(("flags", "Features")))
    here = set(line.partition(":")[2].split())
    library = loaded.load()
    assert not isinstance(library, str)
    built = {library.pw_isa_name(i).decode() for i in range(library.pw_isa_count())}
    assert set(loaded.isas()) == {"scalar"} | {name for name in built & FEATURES.keys() if here >= FEATURES[name]}
