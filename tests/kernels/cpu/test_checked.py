"""The native library looks at its arguments: every exported function, every argument, every rule of src/check.h."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.cpu.native import called

NATIVE = Path(called.__file__).parent
ROOT = NATIVE.parents[3]
RULES = " ".join(" ".join(path.read_text().split()) for path in sorted(called.SOURCE.glob("check*.h")))
DEBUG = ["-std=c++17", "-O0", "-g1", "-w", "-fopenmp", "-fsanitize=address", "-ffp-contract=off"]


def test_every_exported_function_checks_its_arguments_first() -> None:
    rules = RULES
    bodies = called.exported()
    assert {"pw_int_linear", "pw_float_linear", "pw_quantize", "pw_optim_steps"} < set(bodies)
    for name in called.counted():
        body = bodies[name][bodies[name].index("{") :]
        check = re.search(rf'check::(\w+)\(\s*"{name}"', body)
        assert check, f"{name} does not check its arguments"
        assert re.search(rf"\binline bool {check.group(1)}\(const char\* function", rules), check.group(0)
        used = [body.find(word) for word in ("table()", "huge_pages(", "ISAS[") if word in body]
        assert all(body.index(check.group(0)) < at for at in used), f"{name} uses its arguments before they are checked"


def test_the_program_calls_every_exported_function_and_breaks_its_rules() -> None:
    text = "".join(path.read_text() for path in sorted(NATIVE.glob("*.h")))
    for name in called.counted():
        assert re.search(rf"\b{name}\(", text), f"{name} is called by no case"
        assert re.search(rf'refuse\(\s*"{name}"', text), f"no broken arguments for {name}"


def test_every_pointer_of_a_structure_has_an_extent() -> None:
    """A pointer that is added to a structure must be added to check.h."""
    rules, seen = RULES, set()
    text = re.sub(r"//.*", "", (called.SOURCE / "abi.h").read_text())
    for one, several in re.findall(r"^ *(?:const )?\w+(?:\* (\w+)| (\*[^;()]*));", text, re.MULTILINE):
        seen.update(re.findall(r"\w+", one or several))
    assert {"x", "y", "codes", "outer_scale", "values", "low", "high", "table", "cells", "p", "g"} < seen
    for name in seen:
        # memory("codes", a.codes, ..), input(c, a.x, ..), codes(c, a, p.codes)
        assert re.search(
            rf"(memory|part|input|codes)\([^;]*\b\w\.{name}\b|(memory|part|input)\([^;]*, {name},", rules
        ), name


def test_intrinsics_are_in_simd_files_only() -> None:
    """So that each kernel is written once; simd.h describes the names that every instruction set has."""
    intrinsic = re.compile(r"\b_mm\d*_\w+\(|\b__m(128|256|512)|\bv\w+_[suf]\d+\(|__builtin_ia32")
    found = {p.name for p in called.SOURCE.glob("*") if p.suffix in (".h", ".cpp") and intrinsic.search(p.read_text())}
    assert {"simd_avx2.h", "simd_avx512.h", "simd_neon.h"} < found
    assert {name for name in found if not name.startswith("simd_")} == {"platform.h"}  # how a waiting thread pauses


def test_the_script_names_what_exists() -> None:
    script = (ROOT / "scripts/sanitize").read_text()
    paths = re.findall(r"tests/[\w/.]+", script)
    assert len(paths) > 5
    assert [p for p in paths if not (ROOT / p).exists()] == []
    assert 'called.py "$counts" --every $isas' in script


def test_missing_calls_are_told() -> None:
    calls = called.Counter({(name, "scalar"): 1 for name in called.counted()})
    assert called.missing(calls, ["scalar"]) == []
    del calls["pw_ranges", "scalar"], calls["pw_isa_use", "scalar"]
    assert called.missing(calls, ["scalar"]) == ["pw_isa_use was not called", "pw_ranges was not called under scalar"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """every_isa with plain C++ only, under the address sanitizer, with assertions."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    out = tmp_path_factory.mktemp("native")
    parts = ("int_linear", "float_linear", "convolution", "conversions")
    sources = {name: called.SOURCE / f"{name}.cpp" for name in ("dispatch", *parts)}
    sources["main"] = NATIVE / "every_isa.cpp"

    def compiled(item: tuple[str, Path]) -> str:
        name, source = item
        more = ["-DPW_ISA=scalar"] if name in parts else ["-DPENNYWEIGHT_ASSERT=1"]
        subprocess.run([compiler, *DEBUG, *more, "-c", source, "-o", out / f"{name}.o"], check=True)
        return str(out / f"{name}.o")

    with ThreadPoolExecutor(3) as pool:
        objects = list(pool.map(compiled, sources.items()))
    subprocess.run([compiler, *DEBUG, *objects, "-o", out / "every_isa"], check=True)
    return out / "every_isa"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "rounds", "says"),
    [
        ((), 4, "comparisons with plain C++, 0 wrong"),
        (("--wild",), 4, "comparisons with plain C++, 0 wrong"),
        (("--short",), 4, "calls to be refused, 0 were not"),
        (("--broken",), 1, "calls to be refused, 0 were not"),
    ],
    ids=lambda p: " ".join(p) if isinstance(p, tuple) else "",
)
def test_plain_code_under_the_address_sanitizer(
    program: Path, tmp_path: Path, options: tuple[str, ...], rounds: int, says: str
) -> None:
    """No byte beyond an argument is touched; an argument a byte too short and a broken rule are noticed."""
    counts = tmp_path / "counts"
    done = subprocess.run(
        [program, *options, "--seed", "7", str(rounds), "scalar"], capture_output=True, text=True, check=False,
        timeout=300, env={"PENNYWEIGHT_COUNTS": str(counts), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.startswith(f"{rounds} rounds, ")
    assert says in done.stdout
    if not options:
        assert called.missing(called.read(counts), ["scalar"]) == []
