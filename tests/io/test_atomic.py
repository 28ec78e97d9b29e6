"""Whatever stops a writer, a reader finds the old checkpoint or the new one, whole, and the next writer cleans up."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import pennyweight as pw
from pennyweight.cli import output
from pennyweight.export import onnx as export_onnx
from pennyweight.io import (
    CheckpointError,
    atomic_write,
    checkpoint,
    convert,
    load,
    quantize_checkpoint,
    replace_checkpoint,
    save,
    saving,
)
from pennyweight.io.atomic_write import remove_left_over, write_bytes
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.gguf_file import Writer as GGUFWriter
from pennyweight.io.gguf.metadata import Value
from pennyweight.io.replace_checkpoint import replacing
from pennyweight.report import golden_outputs
from pennyweight.report.golden_outputs import Golden
from tests import forked
from tests.io.crashing import Crash, full_after, stopping

INT8 = pw.Int8WeightOnlyConfig()
SHARDS, ONE = 3000, 1 << 30  # max_shard_bytes: two files, or one
State = dict[str, Tensor]


def state(number: float) -> State:
    return {f"layers.{i}.weight": torch.full((16, 32), number + i / 8) for i in range(2)}


OLD, NEW, NEXT = state(1), state(2), state(3)


def names_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} if folder.is_dir() else set()


def by_index_first(folder: Path) -> State | None:
    """As this library reads."""
    if not any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    return {name: t.dequantize() if isinstance(t, pw.AffineQuantizedTensor) else t for name, t in load(folder).items()}


def by_file_first(folder: Path) -> State | None:
    """As transformers reads: one file where it is there, else what the index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    if not index.exists():
        return None
    files = set(json.loads(index.read_text())["weight_map"].values())
    return {name: t for file in files for name, t in load_file(folder / file).items()}


def same(found: State | None, expected: State | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(torch.equal(found[name], t) for name, t in expected.items())


def which(found: State | None, **known: State | None) -> str:
    """Which of the known checkpoints it is, whole."""
    return next(name for name, expected in known.items() if same(found, expected))


@dataclass(frozen=True)
class Operation:
    """before: makes the old state. write: what may be stopped. see: "old" or "new", by each way of reading.
    again: the next write, after which the folder has the files ``left``."""

    before: Callable[[Path], object]
    write: Callable[[Path], object]
    see: Callable[[Path], set[str]]
    again: Callable[[Path], object]
    left: set[str]


def see_folder(old: State | None, new: State) -> Callable[[Path], set[str]]:
    return lambda d: {which(read(d / "out"), old=old, new=new) for read in (by_index_first, by_file_first)}


def save_over(before: int | None, after: int) -> Operation:
    return Operation(
        lambda d: None if before is None else save(OLD, d / "out", max_shard_bytes=before),
        lambda d: save(NEW, d / "out", max_shard_bytes=after),
        see_folder(None if before is None else OLD, NEW),
        lambda d: save(NEXT, d / "out"),
        {"out/model.safetensors"},
    )


def see_file(read: Callable[[Path], Any], old: Any, new: Any) -> Callable[[Path], set[str]]:
    def see(d: Path) -> set[str]:
        found = read(d)
        assert found in (old, new), found
        return {"old" if found == old else "new"}

    return see


def source(d: Path, of: State = NEW, name: str = "src") -> Path:
    save(of, d / name, max_shard_bytes=ONE)
    (d / name / "config.json").write_text(
        json.dumps({"model_type": "none of these", "made": float(of["layers.0.weight"][0, 0])})
    )
    return d / name


def quantize(d: Path, out: str = "out", **kwargs: Any) -> None:
    quantize_checkpoint(d / "src", d / out, INT8, max_shard_bytes=1000, **kwargs)


def write_folder(d: Path, of: State = NEW) -> None:
    """What save_pretrained and its like do: configs, then weights, in place."""
    number = float(of["layers.0.weight"][0, 0])
    with replacing(d / "out") as new:
        Path(new, "config.json").write_text(json.dumps({"made": number}))
        save(of, new, max_shard_bytes=SHARDS)


def see_pair(d: Path) -> set[str]:
    """config.json and weights of one checkpoint, beside a file of somebody's own."""
    weights = {which(read(d / "out"), old=OLD, new=NEW) for read in (by_index_first, by_file_first)}
    made = json.loads((d / "out" / "config.json").read_text())["made"]
    assert weights == {{1: "old", 2: "new"}[made]}
    assert (d / "out" / "mine" / "notes.txt").read_text() == "mine"
    return weights


def before_pair(d: Path) -> None:
    save(OLD, d / "out", max_shard_bytes=ONE)
    (d / "out" / "config.json").write_text('{"made": 1}')
    (d / "out" / "mine").mkdir()
    (d / "out" / "mine" / "notes.txt").write_text("mine")


def force(d: Path) -> None:
    """convert --force."""

    def job(folder: str, **how: Any) -> Any:
        return convert(d / "src", folder, to="float", max_shard_bytes=SHARDS, **how)

    out = str(d / "out")
    folder = output.output_folder(out, True, job)
    job(folder)
    output.publish_output(folder, out)


def see_quantized(d: Path) -> set[str]:
    found, other = by_index_first(d / "out"), by_file_first(d / "out")
    if found is None:
        assert other is None
        return {"old"}
    for name, t in NEW.items():
        torch.testing.assert_close(found[name], t, atol=0.02, rtol=0)
    assert other is not None
    assert other.keys() == {f"{name}{part}" for name in NEW for part in ("", ".codes", ".scale")}
    return {"new"}


def golden(d: Path, number: int) -> str:
    values, indices = torch.full((2, 3), -float(number)), torch.arange(6, dtype=torch.int32).view(2, 3)
    held = Golden("tensor", ((torch.ones(1),),), (torch.arange(2).int(),), (values,), (indices,), 9, 0.5)
    return held.save(d / "golden.safetensors")


SOURCE = {"src/model.safetensors", "src/config.json"}
SHARDED = {"model.safetensors.index.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2))}
OPERATIONS = {
    **{
        f"save: {before} to {after}": save_over(sizes[before], sizes[after])  # type: ignore[arg-type]
        for sizes in [{"nothing": None, "one": ONE, "shards": SHARDS}]
        for before in sizes
        for after in ("one", "shards")
    },
    "save: a file": Operation(
        lambda d: save(OLD, d / "a.safetensors"),
        lambda d: save(NEW, d / "a.safetensors"),
        lambda d: {which(load(d / "a.safetensors"), old=OLD, new=NEW)},
        lambda d: save(NEXT, d / "a.safetensors"),
        {"a.safetensors"},
    ),
    "quantize_checkpoint": Operation(
        source,
        quantize,
        see_quantized,
        quantize,
        SOURCE | {f"out/{name}" for name in SHARDED | {"config.json"}},
    ),
    "convert: a folder": Operation(
        source,
        lambda d: convert(d / "src", d / "out", to="float"),
        see_folder(None, NEW),
        lambda d: convert(d / "src", d / "out", to="float"),
        SOURCE | {"out/model.safetensors", "out/config.json"},
    ),
    "--force": Operation(
        lambda d: (before_pair(d), source(d)),
        force,
        see_pair,
        force,
        SOURCE | {f"out/{name}" for name in SHARDED | {"config.json", "mine/notes.txt"}},
    ),
    "replacing": Operation(
        before_pair,
        write_folder,
        see_pair,
        lambda d: write_folder(d, NEXT),
        {f"out/{name}" for name in SHARDED | {"config.json", "mine/notes.txt"}},
    ),
    "report": Operation(
        lambda d: write_bytes(str(d / "report.json"), b"old"),
        lambda d: write_bytes(str(d / "report.json"), b"new"),
        see_file(lambda d: (d / "report.json").read_bytes(), b"old", b"new"),
        lambda d: write_bytes(str(d / "report.json"), b"next"),
        {"report.json"},
    ),
    "golden outputs": Operation(
        lambda d: golden(d, 1),
        lambda d: golden(d, 2),
        see_file(lambda d: float(golden_outputs.read(d / "golden.safetensors").values[0][0, 0]), -1.0, -2.0),
        lambda d: golden(d, 3),
        {"golden.safetensors"},
    ),
}  # fmt: skip
# With the steps above "quantize_checkpoint" goes on with its job; a checkpoint that is there is refused, and stays
REFUSES = ("quantize_checkpoint", "convert: a folder")


def fresh(operation: Operation, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    operation.before(folder)
    return folder


def check_next(name: str, operation: Operation, d: Path, seen: set[str]) -> None:
    """The next write succeeds, and leaves nothing of the one that was stopped."""
    if not (name in REFUSES and seen == {"new"} and not list((d / "out").glob("*.progress.json"))):
        operation.again(d)
    else:
        with pytest.raises(CheckpointError, match="already contains a checkpoint"):
            operation.again(d)
        remove_left_over(str(d / "out"))
    assert names_of(d) == operation.left
    assert not [p for p in d.rglob("*") if p.name.endswith(".partial")]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not what is tested here; benchmarks/reliability/kill_writers.py waits for it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize("how", ["before", "after", "error"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_stopped_at_every_step(name: str, how: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    d = fresh(operation, tmp_path / "d")
    assert "new" not in operation.see(d)
    with stopping(how) as steps:
        operation.write(d)
    assert operation.see(d) == {"new"}
    count, seen_all = len(steps), []
    assert count > 4
    for at in range(count):
        d = fresh(operation, tmp_path / "d")
        with pytest.raises(OSError if how == "error" else Crash) as caught, stopping(how, at) as steps:
            operation.write(d)
        seen = operation.see(d)  # whole, whichever it is
        seen_all.append(seen)
        if how == "error":
            assert f"step {at}, " in str(caught.value) or isinstance(caught.value.__context__, OSError)
        check_next(name, operation, d, seen)
    # once it is new it stays so: nothing after the one step takes it back
    for reads in seen_all[seen_all.index({"new"}) :] if {"new"} in seen_all else []:
        assert "new" in reads
    assert "new" not in seen_all[0]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_full_disk_leaves_the_old_one(name: str, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    d = fresh(operation, tmp_path / "d")
    with full_after(1 << 40) as left:
        operation.write(d)
    need = (1 << 40) - left[0]
    assert need >= 3
    for room in sorted({*range(0, need, max(1, need // 20)), need - 1}):
        d = fresh(operation, tmp_path / "d")
        before = operation.see(d)
        with pytest.raises(OSError, match="No space left"), full_after(room):
            operation.write(d)
        assert operation.see(d) == before
        check_next(name, operation, d, before)


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_a_full_disk_says_what_was_needed(name: str, tmp_path: Path) -> None:
    said = rf"No space left on device: {tmp_path / name}: 2048 bytes are required, \d+ are free"
    with pytest.raises(OSError, match=said), full_after(100):
        pw.save({"w": torch.zeros(16, 32)}, tmp_path / name)


# -- several at once ---------------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from tests.io.test_atomic import ONE, SHARDS, save, state
folder, number, seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
end, times = time.monotonic() + seconds, 0
while time.monotonic() < end or times < 6:
    save(state(number), folder, max_shard_bytes=SHARDS if times % 3 else ONE)
    times += 1
"""


def test_two_writers_at_once_and_a_reader(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(OLD, out, max_shard_bytes=SHARDS)
    run = ["-c", WRITER, out]
    writers = [forked.start([*run, n, 2], stdin=forked.PIPE, stdout=forked.PIPE) for n in (2, 3)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdin is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        print(file=writer.stdin, flush=True)  # type: ignore[arg-type]
    seen = []
    while any(writer.poll() is None for writer in writers):
        seen.append(which(load(out), old=OLD, new=NEW, next=NEXT))
    assert [writer.wait() for writer in writers] == [0, 0]
    for writer in writers:
        with writer:
            pass
    assert len(set(seen)) > 1
    assert which(by_index_first(out), new=NEW, next=NEXT) == which(by_file_first(out), new=NEW, next=NEXT)
    save(OLD, out)
    assert names_of(out) == {"model.safetensors"}


@pytest.mark.parametrize("size", [ONE, SHARDS])
def test_the_files_of_a_writer_at_work_are_left_alone(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second writer comes and goes while the first has its files written and none in place."""
    replace = saving.replace_checkpoint

    def later(*args: Any) -> None:
        monkeypatch.setattr(saving, "replace_checkpoint", replace)
        save(NEXT, tmp_path / "out", max_shard_bytes=size)
        assert same(by_index_first(tmp_path / "out"), NEXT)
        replace(*args)

    monkeypatch.setattr(saving, "replace_checkpoint", later)
    save(NEW, tmp_path / "out", max_shard_bytes=SHARDS)
    assert same(by_index_first(tmp_path / "out"), NEW)
    assert same(by_file_first(tmp_path / "out"), NEW)
    assert len(names_of(tmp_path / "out")) == 3


def test_a_checkpoint_over_a_job_that_was_stopped_ends_the_job(tmp_path: Path) -> None:
    source(tmp_path)
    out = tmp_path / "out"
    with stopping("before") as steps:
        quantize(tmp_path, "whole")
    for at in range(0, len(steps), 5):
        shutil.rmtree(out, ignore_errors=True)
        with pytest.raises(Crash), stopping("before", at):
            quantize(tmp_path)
        save(OLD, out)
        assert {n for n in names_of(out) if n != "config.json"} == {"model.safetensors"}
        with pytest.raises(CheckpointError, match="already contains a checkpoint"):
            quantize(tmp_path)
        assert same(by_index_first(out), OLD)


def test_a_job_that_was_stopped_does_not_replace_what_another_wrote_since(tmp_path: Path) -> None:
    source(tmp_path)
    with stopping("before") as steps:
        quantize(tmp_path, "whole")
    with pytest.raises(Crash), stopping("before", len(steps) // 2):
        quantize(tmp_path)
    assert (tmp_path / "out" / "quantize.progress.json").exists()
    save(OLD, tmp_path / "other", max_shard_bytes=SHARDS)
    for file in (tmp_path / "other").iterdir():
        shutil.copy(file, tmp_path / "out")
    with pytest.raises(CheckpointError, match="already contains a checkpoint"):
        quantize(tmp_path)
    assert same(by_index_first(tmp_path / "out"), OLD)


def test_a_job_has_its_folder_to_itself(tmp_path: Path) -> None:
    source(tmp_path)
    refused = []

    def told(done: int, total: int, name: str) -> None:
        for resume in (True, False):
            with pytest.raises(CheckpointError, match="another process is writing there") as caught:
                quantize(tmp_path, resume=resume)
            refused.append(caught.value)

    before = quantize_checkpoint(tmp_path / "src", tmp_path / "one", INT8, max_shard_bytes=1000)
    assert quantize_checkpoint(
        tmp_path / "src", tmp_path / "out", INT8, max_shard_bytes=1000, progress=told
    ).rows == before.rows  # fmt: skip
    assert len(refused) == 4
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()
    }


def test_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are never used twice then, and what may be another's is left there."""
    monkeypatch.setattr(atomic_write, "fcntl", None)
    out = tmp_path / "out"
    save(OLD, out, max_shard_bytes=SHARDS)
    theirs = out / "model-0a1b2c3d-00001-of-00002.safetensors"
    theirs.write_bytes(b"of another writer, who is about to name it")
    for of, size in ((NEW, SHARDS), (NEXT, ONE), (OLD, SHARDS)):
        save(of, out, max_shard_bytes=size)
        assert same(by_index_first(out), of)
        assert same(by_file_first(out), of)
        assert theirs.exists()
        assert len(names_of(out)) == (4 if size == SHARDS else 2)
    assert not SHARDED & names_of(out) - {"model.safetensors.index.json"}


@pytest.mark.parametrize("name", ["replacing", "--force"])
def test_where_folders_cannot_be_exchanged(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are the old or the new ones at every step; only config.json may come before them."""
    monkeypatch.setattr(replace_checkpoint, "exchange_folders", lambda a, b: False)
    operation = OPERATIONS[name]
    d = fresh(operation, tmp_path / "d")
    with stopping("before") as steps:
        operation.write(d)
    assert see_pair(d) == {"new"}
    for at in range(0, len(steps), 3):
        d = fresh(operation, tmp_path / "d")
        with pytest.raises(Crash), stopping("before", at):
            operation.write(d)
        assert {which(read(d / "out"), old=OLD, new=NEW) for read in (by_index_first, by_file_first)} <= {"old", "new"}
        operation.again(d)
        assert {n for n in names_of(d) if "model-" not in n} == {n for n in operation.left if "model-" not in n}


def test_a_reader_tries_anew_when_what_it_opens_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, opened, left = tmp_path / "out", checkpoint.File, [3]
    save(OLD, out, max_shard_bytes=SHARDS)

    def meanwhile(path: str, mmap: bool) -> Any:
        if left[0]:
            left[0] -= 1
            save(NEW if left[0] % 2 else OLD, out, max_shard_bytes=SHARDS)
        return opened(path, mmap)

    monkeypatch.setattr(checkpoint, "File", meanwhile)
    assert same(by_index_first(out), OLD)
    assert left == [0]
    left[0] = 10_000
    with pytest.raises(CheckpointError, match="No such file"):  # and not for ever
        load(out)
    assert left[0] > 9_000
    left[0] = 0
    next(out.glob("model-*")).unlink()
    with pytest.raises(CheckpointError, match="No such file"):  # a checkpoint that lacks a file stays one
        load(out)


def test_shards_of_the_same_names_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other libraries' writers use names again: a reader that has opened one old and one new file sees the index."""
    out, opened, left = tmp_path / "out", checkpoint.File, [1]
    save(OLD, out, max_shard_bytes=SHARDS)
    save(NEW, tmp_path / "new", max_shard_bytes=SHARDS)

    def meanwhile(path: str, mmap: bool) -> Any:
        file = opened(path, mmap)
        if left[0]:
            left[0] = 0
            for name in SHARDED:
                shutil.copy(tmp_path / "new" / name, out / name)
                os.utime(out / name, ns=(1, 1))
        return file

    monkeypatch.setattr(checkpoint, "File", meanwhile)
    assert same(by_index_first(out), NEW)


# -- folders, and what others write ------------------------------------------------------------------------------------


def test_replacing_keeps_what_is_not_the_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "out"
    save(OLD, out, max_shard_bytes=SHARDS)
    (out / "runs").mkdir()
    (out / "runs" / "log").write_text("1")
    (out / "tokenizer.json").symlink_to("runs/log")
    with open(out / "runs" / "log", "a") as log, replacing(out) as new:
        save(NEW, new)
        log.write("2")
    assert names_of(out) == {"model.safetensors", "runs/log", "tokenizer.json"}
    assert (out / "tokenizer.json").is_symlink()
    assert (out / "tokenizer.json").read_text() == "12"
    with replacing(out) as new:  # no weights: the old ones stay
        Path(new, "tokenizer.json").write_text("new")
    assert same(by_index_first(out), NEW)
    assert (out / "tokenizer.json").read_text() == "new"
    assert (out / "runs" / "log").read_text() == "12"
    with pytest.raises(CheckpointError, match="only tensors"), replacing(out) as new:
        save({**NEXT, "x": 3}, new)
    assert same(by_index_first(out), NEW)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with replacing(tmp_path / "sub" / "fresh") as new:
        save(NEXT, new)
    assert same(by_index_first(tmp_path / "sub" / "fresh"), NEXT)
    (tmp_path / "link").symlink_to(out)
    with replacing(tmp_path / "link") as new:
        save(OLD, new)
    assert (tmp_path / "link").is_symlink()
    assert same(by_index_first(out), OLD)


def test_an_onnx_model_and_its_data(tmp_path: Path) -> None:
    """Two files that must be of one model."""
    onnx = pytest.importorskip("onnx")
    ir = pytest.importorskip("onnx_ir")

    def model(number: float) -> Any:
        w = onnx.numpy_helper.from_array(torch.full((64, 64), number).numpy(), "w")
        shape = onnx.helper.make_tensor_value_info("x", 1, [1, 64]), onnx.helper.make_tensor_value_info("y", 1, [1, 64])
        node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
        return ir.from_proto(onnx.helper.make_model(onnx.helper.make_graph([node], "g", shape[:1], shape[1:], [w])))

    def write(d: Path, number: float) -> None:
        export_onnx.save(model(number), str(d / "m.onnx"), max_inline_bytes=1000)

    def read(d: Path) -> float:
        found = {float(v) for v in onnx.numpy_helper.to_array(onnx.load(d / "m.onnx").graph.initializer[0]).flat}
        assert len(found) == 1
        return found.pop()

    write(tmp_path, 1)
    assert names_of(tmp_path) == {"m.onnx", "m.onnx.data"}
    with stopping("before") as steps:
        write(tmp_path, 2)
    for how in ("before", "after", "error"):
        for at in range(len(steps) + 1):
            d = tmp_path / f"{how} {at}"
            d.mkdir()
            write(d, 1)
            try:
                with stopping(how, at):
                    write(d, 2)
            except (Crash, OSError):
                pass
            assert read(d) in (1, 2)
            write(d, 3)
            assert read(d) == 3
            assert len(names_of(d)) == 2, names_of(d)


# -- killed ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on Windows")
def test_killed_on_a_real_disk(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.reliability.kill_writers", "--rounds", 4, "--megabytes", 1, "--folder", tmp_path]
    done = forked.run([*command, "save-shards", "save-switch", "force"], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 rounds, all whole") == 3


# -- files that are mapped ---------------------------------------------------------------------------------------------

TRUNCATED = """
import os, sys, torch
from tests.io.test_atomic import load_all
for path in sys.argv[2:]:
    mmap = sys.argv[1] == "mapped"
    before = {name: t.clone() for name, t in load_all(path, mmap).items()}
    after = load_all(path, mmap)
    for file in [path] if os.path.isfile(path) else [os.path.join(path, n) for n in os.listdir(path)]:
        os.truncate(file, 1)
    assert all(torch.equal(after[name].clone(), t) for name, t in before.items())
    print(len(after), "as before", flush=True)
"""


def load_all(path: str, mmap: bool) -> dict[str, Tensor]:
    found = load(path, mmap=mmap, allow_pickle=True).items()
    parts = {name: t.parts if isinstance(t, pw.AffineQuantizedTensor) else (t,) for name, t in found}
    return {f"{name} {i}": p for name, some in parts.items() for i, p in enumerate(some) if isinstance(p, Tensor)}


def test_truncation_after_loading_changes_nothing_without_mapping(tmp_path: Path) -> None:
    big = {f"w{i}": torch.randn(256, 256) for i in range(3)}
    infos = dict.fromkeys(big, (TYPES["F32"], (256, 256)))
    writer = GGUFWriter(str(tmp_path / "m.gguf"), {"general.architecture": Value("string", "llama")}, infos)
    for name, t in big.items():
        writer.put(name, t.view(torch.uint8))
    writer.finish()
    torch.save(big, tmp_path / "m.pt")
    model = torch.nn.ModuleDict({n: torch.nn.Linear(256, 256) for n in big})
    save(model, tmp_path / "one", max_shard_bytes=ONE)
    save(model, tmp_path / "shards", max_shard_bytes=300_000)
    pw.quantize_(model, INT8)
    save(model, tmp_path / "quantized")
    run = ["-c", TRUNCATED, "copied", *map(str, tmp_path.iterdir())]
    copied = forked.run(run)
    assert copied.stdout.count("as before") == 5, copied.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="what the system does to a mapping is its own")
def test_truncation_of_a_mapped_file_ends_the_process_as_documented(tmp_path: Path) -> None:
    save({"w": torch.randn(512, 512)}, tmp_path / "m")
    run = ["-c", TRUNCATED, "mapped", str(tmp_path / "m")]
    assert forked.run(run).returncode == -signal.SIGBUS


def test_a_file_that_is_cut_short_while_it_is_read_says_so(tmp_path: Path) -> None:
    save({"w": torch.randn(512, 512)}, tmp_path / "m")
    with pw.io.open(tmp_path / "m", mmap=False) as found:
        os.truncate(tmp_path / "m" / "model.safetensors", 1000)
        with pytest.raises(CheckpointError, match="ends early: the file was truncated while it was read"):
            found["w"]
