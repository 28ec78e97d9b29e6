"""scripts/gpu without a device: all stages run, a crash or a hang costs one case, only measurements are checked in."""

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import collect, ncu, page, report, run, stages
from benchmarks.gpu.dry import TROUBLE
from benchmarks.gpu.results import KERNELS, ROOT, Results, commit_of, digest, read, write_json
from pennyweight.kernels.triton import timing, tuning, workspace
from pennyweight.kernels.triton.tiles import Tile

SCRIPT = ROOT / "scripts" / "gpu"


def gpu(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dry") / "out"
    done = gpu("--dry", "--budget", 1500, "--out", out)  # stages end early; a busy machine is no failure
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith((out / "report.txt").read_text())
    return out


def test_a_dry_run_has_every_stage(dry: Path) -> None:
    data = read(dry)
    assert data["dry"]
    assert {name: stage["status"] for name, stage in data["stages"].items()} == dict.fromkeys(stages.NAMES, "done")
    assert not [case for s in data["stages"].values() for case, v in s["cases"].items() if "error" in v]
    assert data["digest"] == {
        "pennyweight": digest(), "kernels": digest(KERNELS), "benchmarks": digest("benchmarks/gpu")
    }  # fmt: skip
    tuned = data["stages"]["tune"]["cases"]["int4-offset m16"]
    assert tuned["complete"]
    assert all("6 stages" in name for name in tuned["dropped"])  # those that dry.py refuses
    assert tuned["dropped"]
    few = data["stages"]["tune"]["cases"]["int4-offset m8"]
    assert data["stages"]["bench"]["cases"]["int4 m1 8192x8192: tuned tile"]["tile"] == few["tile"]
    text = (dry / "report.txt").read_text()
    assert text.startswith("DRY RUN")
    assert "int4 m1 8192x8192" in text
    assert "goals: " in text
    assert sorted(path.name for path in dry.iterdir()) == ["report.txt", "results.json"]  # few files travel back


def test_some_stages(tmp_path: Path) -> None:
    done = gpu("--dry", "--only", "facts,ncu", "--out", tmp_path)
    assert done.returncode == 0
    assert list(read(tmp_path)["stages"]) == ["facts", "ncu"]
    assert gpu("--dry", "--only", "facts,speed", "--out", tmp_path).stderr.startswith("scripts/gpu: no stage speed")


@pytest.mark.exhaustive
def test_a_crash_costs_one_case(tmp_path: Path) -> None:
    done = gpu("--dry", "--only", "conformance,ncu", "--budget", 100, "--out", tmp_path, **{TROUBLE: "crash:case 2"})
    assert done.returncode == 1
    found = read(tmp_path)["stages"]
    cases = found["conformance"]["cases"]
    assert cases["kernels: case 2"]["error"] == "the process ended with exit code 9"
    assert [name for name, values in cases.items() if "error" in values] == ["kernels: case 2"]
    assert "kernels: case 5" in cases
    assert found["conformance"]["status"] == "failed"
    assert found["ncu"]["status"] == "done"
    assert "FAILED conformance: kernels: case 2" in (tmp_path / "report.txt").read_text()


@pytest.mark.exhaustive
def test_a_hang_ends_with_the_budget(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = gpu("--dry", "--only", "conformance,ncu", "--budget", 15, "--out", tmp_path, **{TROUBLE: "hang:case 2"})
    assert time.monotonic() - begin < 30
    assert done.returncode == 1
    found = read(tmp_path)["stages"]
    assert found["conformance"]["cases"]["kernels: case 2"]["error"] == "the budget was used up"
    assert [found[name]["status"] for name in ("conformance", "ncu")] == ["out of time", "out of time"]


def test_a_hanging_case_is_ended_at_its_limit(tmp_path: Path) -> None:
    write_json(tmp_path / "current.json", {"stage": "a", "case": "b", "since": time.time() - 10, "limit": 5})
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert run._watch(sleeper, tmp_path, time.time(), time.time() + 60) == "no result after 5 s"
    assert sleeper.poll() is not None


def test_a_kill_leaves_a_readable_file(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry", "--only", "facts,conformance", "--out", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), TROUBLE: "hang:case 3"}
    process = subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while "kernels: case 2" not in _cases(tmp_path) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    data = read(tmp_path)
    assert data["stages"]["facts"]["status"] == "done"
    assert "kernels: case 2" in data["stages"]["conformance"]["cases"]
    assert report.report(data)
    with pytest.raises(collect.Refused, match="a dry run"):
        collect.checked(tmp_path)


def _cases(folder: Path) -> dict[str, Any]:
    try:
        return Results.open(folder).cases("conformance")
    except (OSError, ValueError):
        return {}


def test_deadlines_and_recorded_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path, {"stages": {}})
    ran: list[str] = []

    def works() -> dict[str, Any]:
        ran.append("works")
        return {"us": math.inf}

    def fails() -> dict[str, Any]:
        raise ValueError("no such tile")

    def late() -> dict[str, Any]:
        ctx.deadline = 0.0
        return {}

    timer = SimpleNamespace(synchronize=lambda: None, release=lambda: None)
    ctx = stages.Context(results, "cpu", timer, SimpleNamespace())
    cases = [stages.Case(f.__name__, f) for f in (works, fails, late)] + [stages.Case("never", works)]
    stage = stages.Stage("one", lambda ctx: cases)
    stages.run_stage(stage, ctx, time.time() + 60)
    found = read(tmp_path)["stages"]["one"]
    assert found["status"] == "out of time"
    assert found["note"] == "stopped before 'never'"
    assert found["cases"]["works"]["us"] == "inf"
    assert found["cases"]["fails"]["error"] == "ValueError: no such tile"
    assert "in fails" in found["cases"]["fails"]["traceback"]
    stages.run_stage(stage, ctx, time.time() + 60)  # as after a restart: what is recorded does not run again
    assert ran == ["works", "works"]
    assert results.stage("one")["status"] == "failed"
    stages.run_stage(stages.Stage("two", lambda ctx: 1 / 0), ctx, time.time() + 60)  # type: ignore[arg-type]
    assert results.stage("two")["note"] == "ZeroDivisionError: division by zero"
    assert "no such tile" in capsys.readouterr().out


def test_deadlines_fill_the_budget() -> None:
    deadlines = run._deadlines(list(stages.NAMES), 1000.0, 1470.0)
    assert list(deadlines) == list(stages.NAMES)
    assert deadlines["ncu"] == pytest.approx(1470.0)
    assert list(deadlines.values()) == sorted(deadlines.values())
    assert sum(stages.SHARES.values()) <= stages.SECONDS
    assert tuple(stage.name for stage in stages.stages()) == stages.NAMES


# -- the timer, with a device of a few lines ---------------------------------------------------------------------------


class Graph:
    """Records the calls of a capture and runs them again."""

    recording: "Graph | None" = None
    replays = 0

    def __init__(self) -> None:
        self.nodes: list[Any] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        Graph.replays += 1
        for node in self.nodes:
            node()


class Event:
    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        self.replays = 0

    def record(self) -> None:
        self.replays = Graph.replays

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return max(other.replays - self.replays, 0) * 0.2  # 200 us for a replay


class Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> timing.DeviceTimer:
    card = SimpleNamespace(L2_cache_size=50 << 20, total_memory=80 << 30)
    cuda = SimpleNamespace(
        get_device_properties=lambda device: card, Stream=Stream, Event=Event,
        CUDAGraph=Graph, synchronize=lambda device=None: None, stream=lambda stream: stream,
        current_stream=lambda device=None: Stream(), empty_cache=lambda: None, memory_reserved=lambda device: 50 << 30,
    )  # fmt: skip
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    return timing.DeviceTimer("cpu")


def op(value: float, fails_in_graph: bool = False) -> Any:
    def call() -> torch.Tensor:
        out = torch.full((4,), value)
        if Graph.recording is not None:
            Graph.recording.nodes.append((lambda: None) if fails_in_graph else lambda: out.fill_(value))
        return out

    return call


def test_the_timer_rotates_poisons_and_takes_the_median(timer: timing.DeviceTimer) -> None:
    assert timer.copies(36 << 20) == 4  # 144 MB, beyond 2.5 times 50 MB
    assert timer.copies(1 << 40) == 2
    found = timer.time([op(1.0), op(2.0)])
    passes = math.ceil(timing._GRAPH_US / 200)
    assert found.us == pytest.approx(200 / (2 * passes))
    assert (found.spread, found.samples, found.copies) == (0.0, 7, 2)
    with pytest.raises(timing.WrongResult, match="differs from the eager one by nan"):
        timer.time([op(1.0), op(2.0, fails_in_graph=True)])
    assert timer.launch(op(1.0), count=3) > 0
    assert timing.summary([2.0, 1.0, 4.0]) == timing.Timing(2.0, 1.5, 3, 1)


def test_timed_graphs_give_their_locks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, device = torch.zeros(8), torch.device("cuda", 3)
    with workspace.temporary_locks(device):
        workspace._CAPTURED[3] = (arena, 6)  # the first call on the device made the array, then captures took some
    assert workspace._CAPTURED.pop(3) == (arena, 0)
    monkeypatch.setitem(workspace._CAPTURED, 3, (arena, 2))
    with workspace.temporary_locks(device):
        workspace._CAPTURED[3] = (arena, 7)
    assert workspace._CAPTURED[3] == (arena, 2)


def test_a_capture_that_fails_raises_its_own_error(timer: timing.DeviceTimer) -> None:
    def refuses() -> torch.Tensor:
        if Graph.recording is not None:
            raise ValueError("not in a graph")
        return torch.ones(1)

    with pytest.raises(ValueError, match="not in a graph"):
        timer.time([refuses])
    assert Graph.recording is None


# -- choosing a tile ---------------------------------------------------------------------------------------------------


def tiles_timed(us: dict[int, float], wrong: int = 0, seconds: float = 1.0) -> tuning.Tuned:
    """Tiles of bn -> microseconds; the shipped one is 64. One computes wrong values; time may end."""
    w, x = torch.randn(8, 4), torch.randn(2, 4)
    weight = SimpleNamespace(dequantize=lambda: w)
    clock = iter([seconds] * 2 + [seconds if seconds > 0.5 else 0.0] * 100)

    def prepare(x: torch.Tensor, weight: Any, bias: Any, tile: Any) -> Any:
        call = lambda: x @ w.t() * (2 if tile.bn == wrong else 1)  # noqa: E731
        call.us = us[tile.bn]  # type: ignore[attr-defined]
        return call

    timer = SimpleNamespace(
        time=lambda calls, samples, check: timing.Timing(calls[0].us, 0.01, samples, 1), synchronize=lambda: None
    )
    made = {bn: Tile(16, bn, 32, 4, 3) for bn in us}
    products: Any = {"one": [(x, weight)]}
    return tuning.fastest(list(made.values()), made[64], products, prepare, timer, lambda: next(clock))  # type: ignore[arg-type]


def test_a_new_tile_must_be_clearly_faster_and_right() -> None:
    assert tiles_timed({64: 10.0, 128: 9.9}).tile.bn == 64  # type: ignore[union-attr]
    found = tiles_timed({64: 10.0, 128: 9.0, 256: 1.0}, wrong=256)
    assert (found.tile.bn, found.timing.us, found.shipped_us, found.complete) == (128, 9.0, 10.0, True)  # type: ignore[union-attr]
    (why,) = found.dropped.values()
    assert why.startswith("ValueError: one: differs by 1.00e+00 from the dequantized product")
    late = tiles_timed({64: 10.0, 128: 9.0, 256: 1.0}, seconds=0.1)
    assert not late.complete
    assert late.tile.bn == 128  # type: ignore[union-attr]


# -- checking in -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The parts of the repository that are written."""
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "gpu.md", root / "docs")
    (root / KERNELS).mkdir(parents=True)
    for path in (ROOT / KERNELS).rglob("*.py"):
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


@pytest.fixture
def measured(dry: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder as a device would leave it."""
    data = read(dry)
    data |= {"dry": False, "commit": "0123456789abcdef"}
    data["stages"]["facts"]["cases"]["machine"] |= {
        "card": "NVIDIA H100 80GB HBM3",
        "driver": "580.1",
        "triton": "3.6.0",
    }
    folder = tmp_path / "measured"
    folder.mkdir()
    return folder, data


def test_a_dry_run_is_refused(dry: Path, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect.collect(dry, tree) == 2
    assert "a dry run: its times are invented" in capsys.readouterr().out
    assert not (tree / collect.RESULTS).exists()
    assert not (tree / collect.TILES).exists()
    collect.check_in(dry, tree, allow_dry=True)
    assert "**Invented: a dry run.**" in (tree / collect.PAGE).read_text()


def test_results_tiles_and_page_are_written(measured: Any, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, data = measured
    write_json(folder / "results.json", data)
    assert collect.collect(folder, tree) == 0
    name = f"h100-80gb-hbm3-{data['started'][:10]}.json"
    assert json.loads((tree / collect.RESULTS / name).read_text()) == data
    lines = json.loads((tree / collect.TILES).read_text())["lines"]
    assert lines
    assert {line["source"] for line in lines} == {f"{collect.RESULTS}/{name}"}
    assert len({tuple(line.get(key) for key in collect.KEY) for line in lines}) == len(lines)
    assert sum("device" in line for line in lines) == sum("target" in line for line in lines) == len(lines) // 2
    text = (tree / collect.PAGE).read_text()
    assert page.NOTHING not in text
    assert "commit 0123456789ab: 22 conformance cases, 0 failed. Driver 580.1" in text
    assert "| `cuda:sm_90` | H100, H200 |" in text
    assert "ran on NVIDIA H100 80GB HBM3" in text
    assert "| int4 m1 8192x8192 |" in text
    assert text == page.rendered(text, tree)
    assert page.summary(tree) == "ran on NVIDIA H100 80GB HBM3"
    assert collect.collect(folder, tree) == 0  # the same day again: another file
    assert (tree / collect.RESULTS / name.replace(".json", "-2.json")).exists()
    assert len(json.loads((tree / collect.TILES).read_text())["lines"]) == len(lines)


def test_a_second_card_of_a_target_gets_lines_of_its_own(measured: Any, tree: Path) -> None:
    folder, data = measured
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        data["stages"]["facts"]["cases"]["machine"]["card"] = card
        write_json(folder / "results.json", data)
        assert collect.collect(folder, tree) == 0
    lines = json.loads((tree / collect.TILES).read_text())["lines"]
    others = [line for line in lines if "target" in line]
    assert {line["source"].partition("-")[0] for line in others} == {f"{collect.RESULTS}/h100"}
    assert {line["device"] for line in lines if "device" in line} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    assert len(lines) == 3 * len(others)


def test_tiles_need_conformance_on_the_same_kernels(measured: Any, tree: Path) -> None:
    folder, data = measured
    cases = data["stages"]["conformance"]["cases"]
    cases["kernels: case 1"]["error"] = "int4, 5 rows: NaN"
    write_json(folder / "results.json", data)
    found = collect.check_in(folder, tree)
    assert found.refused == "conformance failed: kernels: case 1"
    assert found.path.exists()
    assert not (tree / collect.TILES).exists()
    assert "22 conformance cases, 1 failed" in (tree / collect.PAGE).read_text()
    del cases["kernels: case 1"]["error"]
    data["stages"]["conformance"]["status"] = "out of time"
    assert collect.why_no_tiles(data, tree) == "conformance is out of time"
    data["stages"]["conformance"]["status"] = "done"
    assert collect.why_no_tiles(data, tree) == ""
    (tree / KERNELS / "new.py").write_text("# a change\n")
    assert "have changed since the run" in collect.why_no_tiles(data, tree)
    del data["stages"]["conformance"]
    assert collect.why_no_tiles(data, tree) == "conformance did not run"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data.update(commit=""), "the commit is not known"),
        (lambda data: data.update(version=9), "not of version 1"),
        (lambda data: data.pop("digest"), "has no digest"),
        (lambda data: data["stages"].pop("facts"), "stage facts did not find card"),
        (lambda data: data["stages"]["bench"]["cases"]["int4 m1 8192x8192"].pop("spread"), "a time without a spread"),
    ],
)
def test_incomplete_results_are_refused(measured: Any, tree: Path, change: Any, why: str) -> None:
    folder, data = measured
    change(data)
    write_json(folder / "results.json", data)
    with pytest.raises(collect.Refused, match=why):
        collect.check_in(folder, tree)
    (folder / "results.json").write_text('{"version": 1, ')
    with pytest.raises(collect.Refused, match="cannot be read"):
        collect.check_in(folder, tree)


def test_the_page_is_what_the_files_give() -> None:
    text = (ROOT / collect.PAGE).read_text("utf-8")
    assert text == page.rendered(text), "run python -m benchmarks.gpu.page"
    assert {match[2] for match in page._MARK.finditer(text)} == set(page.PARTS)


def test_every_shipped_tile_names_a_results_file() -> None:
    path = ROOT / collect.TILES
    for line in json.loads(path.read_text("utf-8"))["lines"]:
        source = ROOT / line["source"]
        assert source.parent == ROOT / collect.RESULTS, line
        data = json.loads(source.read_text("utf-8"))
        assert not data["dry"]
        tuned = data["stages"]["tune"]["cases"].values()
        assert line["tile"] in [values.get("tile") for values in tuned], line


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_counters_are_read_from_csv() -> None:
    text = "==PROF== Connected\n" + "\n".join(
        [
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
            '"0","wo_int","gpu__time_duration.sum","ns","12,345"',
            '"0","wo_int","dram__bytes_read.sum","byte","35,700,000"',
            '"1","reduce","gpu__time_duration.sum","ns","n/a"',
            '"1","reduce","not asked for","ns","1"',
        ]
    )
    assert ncu.parse(text) == [
        {"name": "wo_int", "time": 12345.0, "bytes read": 35.7e6}, {"name": "reduce", "time": "n/a"}
    ]  # fmt: skip
    assert ncu.parse("==ERROR== LibraryNotLoaded") == []


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\nfeed refs/heads/main\n")
    assert commit_of(tmp_path) == "feed"
    (git / "refs" / "heads" / "main").write_text("beef\n")
    assert commit_of(tmp_path) == "beef"
    (git / "HEAD").write_text("cafe\n")
    assert commit_of(tmp_path) == "cafe"


def test_preparing_needs_triton_and_says_so(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is not None:
        pytest.skip("Triton is installed")
    done = gpu("--prepare", "--out", tmp_path)
    assert done.returncode == 1
    found = json.loads((tmp_path / "compile.json").read_text())
    assert found["note"] == "the kernels cannot be listed"
