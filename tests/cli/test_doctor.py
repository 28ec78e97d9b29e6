"""doctor tells what is there, and finds what is broken."""

import json
import platform
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.cli import doctor, doctor_bench, doctor_gpu, doctor_gpu_bench
from pennyweight.kernels import Kernel, get_kernel, kernels, table, torch_int8
from pennyweight.kernels.cpu.library import available


def test_doctor_states_versions_cpu_and_every_kernel(run: Any) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["healthy"]
    assert data["versions"] == {
        "pennyweight": pw.__version__, "torch": torch.__version__, "python": platform.python_version()
    }  # fmt: skip
    assert data["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert data["cpu"]["threads"] == torch.get_num_threads()
    assert [(k["op"], k["name"]) for k in data["kernels"]] == [(k.op, k.name) for k in kernels()]
    assert all(k["note"] for k in data["kernels"])
    assert not any(k["broken"] for k in data["kernels"])
    text = run("doctor").stdout
    words = (data["native_kernels"], data["fused_blocks"], "healthy")
    for word in (pw.__version__, torch.__version__, data["cpu"]["capability"], *words):
        assert word in text
    for k in data["kernels"]:
        assert any(k["name"] in line and k["note"] in line for line in text.splitlines()), k


def wrong(scale: float) -> Any:
    reference = get_kernel("linear", "dequantize").run
    return lambda x, w, bias: reference(x, w, bias) * scale


def crash(x: Any, w: Any, bias: Any) -> Any:
    raise RuntimeError("illegal instruction, say")


@pytest.mark.parametrize(
    ("run_kernel", "tolerance", "usable", "note"),
    [
        (wrong(1.01), "float32", False, "differs by 1.0e-02 from the reference"),
        (wrong(1.01), "bfloat16", True, "within 1e-02 of the reference"),
        (crash, "float32", False, "RuntimeError: illegal instruction, say"),
        (wrong(float("nan")), "bfloat16", False, "differs by nan"),
    ],
)
def test_doctor_finds_a_kernel_that_lies(
    run: Any, monkeypatch: pytest.MonkeyPatch, run_kernel: Any, tolerance: str, usable: bool, note: str
) -> None:
    bad = Kernel("linear", "suspect", run_kernel, lambda case: True, tolerance=tolerance, rank=99)
    monkeypatch.setitem(table._TABLE, "linear", [bad, *table._TABLE["linear"]])
    result = run("doctor", "--json")
    data = json.loads(result.stdout)
    (row,) = [k for k in data["kernels"] if k["name"] == "suspect"]
    assert (row["usable"], row["broken"]) == (usable, not usable)
    assert note in row["note"]
    assert data["healthy"] is usable
    assert result.exit_code == (0 if usable else 1)
    assert ("problem: kernel linear/suspect" in run("doctor").stdout) is not usable


def test_a_kernel_for_another_device_is_no_problem(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    far = Kernel("linear", "far", crash, lambda case: True, devices=("mars",))
    monkeypatch.setitem(table._TABLE, "linear", [far, *table._TABLE["linear"]])
    result = run("doctor", "--json")
    (row,) = [k for k in json.loads(result.stdout)["kernels"] if k["name"] == "far"]
    assert (row["usable"], row["broken"], row["note"]) == (False, False, "runs on mars only")
    assert result.exit_code == 0


@pytest.mark.parametrize("saturates", [False, True])
def test_saturation_is_told(run: Any, monkeypatch: pytest.MonkeyPatch, saturates: bool) -> None:
    monkeypatch.setattr(torch_int8, "int_mm_saturates", lambda: saturates)
    table._select.cache_clear()  # a selection remembers what the CPU was
    result = run("doctor", "--json")
    table._select.cache_clear()
    data = json.loads(result.stdout)
    assert data["cpu"]["int_mm_saturates"] is saturates
    assert ("torch._int_mm saturates" in run("doctor").stdout) is saturates
    (row,) = [k for k in data["kernels"] if k["name"] == "torch_int_mm"]
    assert row["usable"] is not saturates
    assert ("saturates on this CPU" in row["note"]) is saturates
    assert result.exit_code == 0  # another kernel does the work, exactly


def test_bench_names_faster_and_slower_truly(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(2e-6, 4e-6, False), (4e-6, 2e-6, True)] * 100)
    monkeypatch.setattr(doctor_bench, "_alternate", lambda a, b: (a(), b(), next(times))[-1])
    for name, size in (("SIZE", 128), ("CHANNELS", 8), ("IMAGE", 8), ("WIDTH", 64)):
        monkeypatch.setattr(doctor_bench, name, size)
    output = run("doctor", "--bench").stdout
    parts = output.partition("products [rows, 128] @ [128, 128]:")[2].partition("\n\n")
    lines = [line for line in parts[0].splitlines() if " us, float" in line]
    assert len(lines) == 2 * len(doctor_bench.NAMES) * len(doctor_bench.ROWS)
    for line in lines:
        one = " 1 row " in line
        assert ("2.00x faster" if one else "2.00x slower") in line
        assert ("the machine is busy" in line) is not one
    assert any(line.startswith("int4 ") and line.endswith(("(cpu_int)", "(torch_int4)")) for line in lines)
    data = json.loads(run("doctor", "--bench", "--json").stdout)
    products = [b["rows"] for b in data["bench"] if b["what"].startswith("products")]
    assert products == list(doctor_bench.ROWS) * 2 * len(doctor_bench.NAMES)


def test_bench_times_convolutions_and_a_fused_block(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_bench, "_alternate", lambda a, b: (a(), b(), (1e-6, 1e-6, False))[-1])
    for name, size in (("SIZE", 64), ("CHANNELS", 32), ("IMAGE", 8), ("WIDTH", 64)):
        monkeypatch.setattr(doctor_bench, name, size)
    lines = doctor_bench.measure()
    by_part = {what: [line for line in lines if line.what == what] for what in dict.fromkeys(x.what for x in lines)}
    assert list(by_part)[1:] == [
        "convolution 32 to 32 channels, 3×3, 8×8", "transposed convolution 128 to 64 channels, 4×4, stride 2, 2×2",
        "transformer block of width 64",
    ]  # fmt: skip
    _, convolution, transposed, block = by_part.values()
    assert [line.rows for line in convolution] == [64] * len(doctor_bench.NAMES)
    assert [line.rows for line in transposed] == [4] * len(doctor_bench.NAMES)
    assert [line.rows for line in block] == list(doctor_bench.TOKENS) * len(doctor_bench.NAMES)
    assert " 64 positions float32" in str(convolution[0])
    assert "   1 token  float32" in str(block[0])
    if available() is True:
        assert [line.kernel for line in convolution[:2]] == ["cpu_conv", "cpu_conv_float"]
        assert {line.kernel for line in transposed} == {"cpu_int_columns"}
        assert {line.kernel for line in block} == {"block"}
    else:
        assert all(line.kernel.startswith("not fused: ") for line in block)


def test_doctor_fuses_a_small_block(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(run("doctor", "--json").stdout)
    if available() is not True:
        assert data["fused_blocks"].startswith("no, blocks run layer by layer: ")
        return
    assert data["fused_blocks"] == "yes, within tolerance of their own forward"

    def broken(width: int, name: str) -> Any:
        raise RuntimeError("illegal instruction, say")

    def refused(width: int, name: str) -> Any:
        return None, "it differs"

    for fails, text in ((broken, "RuntimeError: illegal instruction, say"), (refused, "it differs")):
        monkeypatch.setattr(doctor, "fused_encoder", fails)
        result = run("doctor", "--json")
        data = json.loads(result.stdout)
        assert data["fused_blocks"] == f"BROKEN, {text}"
        assert data["problems"] == [f"fused blocks: BROKEN, {text}"]
        assert result.exit_code == 1


@pytest.mark.parametrize(("slowest", "noisy"), [(1.5, False), (3.0, True)])
def test_bench_takes_medians_and_sees_noise(monkeypatch: pytest.MonkeyPatch, slowest: float, noisy: bool) -> None:
    samples = iter([1.0, 1.0, *[1.0, 4.0] * (doctor_bench._ROUNDS - 1), slowest, 4.0])  # two to find counts, then pairs
    monkeypatch.setattr(doctor_bench, "_time", lambda f, count: next(samples))
    assert doctor_bench._alternate(lambda: None, lambda: None) == (1.0, 4.0, noisy)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [(1.0, 1.004, "same speed"), (1.004, 1.0, "same speed"), (1.0, 1.69, "1.69x faster"), (1.1, 1.0, "1.10x slower")],
)
def test_bench_verdict(ours: float, theirs: float, verdict: str) -> None:
    timing = doctor_bench.Timing("int8", "float32", 1, "cpu_int", ours, theirs, False)
    assert f": {verdict} (" in str(timing)


# -- GPUs: this machine has none, and a stand-in shows the rest --------------------------------------------------------


def test_a_missing_gpu_is_a_problem(run: Any) -> None:
    result = run("doctor", "--device", "cuda", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert not data["healthy"]
    assert data["problems"][0].startswith("no device cuda: torch ")
    assert data["versions"]["torch"] == torch.__version__
    text = run("doctor", "--device", "cuda:3", "--bench", "--tune").stdout
    assert "problem: no device cuda:3: torch" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune"], "--tune chooses tiles for a GPU: pass --device cuda"),
        (["--device", "cpu"], "doctor checks the kernels of CUDA and ROCm devices"),
        (["--device", "tpu"], "is not a device"),
    ],
)
def test_a_wrong_device_is_an_error(run: Any, arguments: list[str], message: str) -> None:
    result = run("doctor", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


class Card:
    name, total_memory = "NVIDIA H100 80GB HBM3", 80 << 30


class Timer:
    """Every second time is that of bfloat16: twice as slow."""

    def __init__(self, device: str) -> None:
        self.count = 0

    def copies(self, nbytes: int) -> int:
        return 1

    def time(self, calls: list[Any], **options: Any) -> Any:
        from pennyweight.kernels.triton.timing import Timing

        calls[0]()
        self.count += 1
        return Timing(10.0 * (2 - self.count % 2), 0.01, 7, 1)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in place of a GPU."""
    import contextlib

    from pennyweight.kernels.triton import timing

    real = doctor_gpu_bench.quantized_weight
    cpu = torch.device("cpu")
    monkeypatch.setattr(doctor_gpu, "why_no_device", lambda device: "")
    monkeypatch.setattr(doctor_gpu, "_driver", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for module in (doctor_gpu, doctor_gpu_bench):
        monkeypatch.setattr(module, "quantized_weight", lambda name, size, device: real(name, size, cpu))
        monkeypatch.setattr(module, "SIZE", 128)
    monkeypatch.setattr(timing, "DeviceTimer", Timer)
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: torch.ones(shape, dtype=dtype))


def self_test(verdict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pennyweight.kernels.triton import self_test

    cases = [
        SimpleNamespace(name="int4, 1 row"),
        SimpleNamespace(name="int4, graph"),
        SimpleNamespace(name="nf4, 3 rows"),
    ]
    monkeypatch.setattr(self_test, "cases", lambda full: cases)
    monkeypatch.setattr(self_test, "run", lambda case, device: verdict(case.name))


def test_the_table_of_a_gpu(run: Any, card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    self_test(lambda name: None, monkeypatch)
    result = run("doctor", "--device", "cuda", "--bench")
    assert result.exit_code == 0, result.stdout
    lines = result.stdout.splitlines()
    assert any(line.split() == ["card", *Card.name.split()] for line in lines)
    assert any(line.split() == ["int4", "passed", "2", "cases"] for line in lines)
    for name, words in doctor_gpu.SCHEMES.items():
        assert any(line.startswith(words) for line in lines), name
        cells = [line.split()[:5] for line in lines if line.startswith(f"{name} ")]
        timed = [row for row in cells if row[1].isdigit()]
        assert timed == [[name, str(m), "10.0", "20.0", "2.00"] for m in doctor_gpu_bench.ROWS]
    assert lines[-1] == "healthy"


def test_a_kernel_that_fails_on_the_gpu(run: Any, card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict(name: str) -> str | None:
        if name == "int4, graph":
            return "two runs differ"
        if name.startswith("nf4"):
            raise RuntimeError("ptxas: too many resources")
        return None

    self_test(verdict, monkeypatch)
    result = run("doctor", "--device", "cuda", "--tune", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert data["families"] == {
        "int4": "FAILED 1, passed 1 cases: int4, graph: two runs differ",
        "nf4": "FAILED 1, passed 0 cases: nf4, 3 rows: RuntimeError: ptxas: too many resources",
    }
    assert data["tiles"] == ""
    assert data["problems"][-1] == "no tiles are chosen while something fails"
