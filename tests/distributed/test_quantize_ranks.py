"""Quantizing a checkpoint on several ranks: the files of one process, whole or not at all."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from pennyweight.io import CheckpointError, quantize_checkpoint, resumable_write
from pennyweight.planning.configs.by_name import by_name
from tests import forked
from tests.distributed.group import METHOD

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
SIZE = 20_000  # bytes of a file: five of them


def source(folder: Path, bad: bool = False) -> Path:
    """Two files and an index, as large models come."""
    g = torch.Generator().manual_seed(0)
    tensors = {f"blocks.{i}.up.weight": torch.randn(128, 128, generator=g) for i in range(5)}
    tensors |= {f"blocks.{i}.norm.weight": torch.ones(128) for i in range(5)}
    if bad:
        tensors["blocks.3.up.weight"][5, 5] = torch.nan
    folder.mkdir()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:6], "model-00002-of-00002.safetensors": names[6:]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    where = ", ".join(f'"{n}": "{file}"' for file, part in halves.items() for n in part)
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{where}}}}}')
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def convert(src: Path, dst: Path, **how: Any) -> Any:
    return quantize_checkpoint(src, dst, by_name("int8", None), max_shard_bytes=SIZE, **how)


def work(rank: int, ranks: int, meet: str, src: str, dst: str, fault: str) -> None:
    """One rank; what it raises goes into a file beside dst."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    write, count = resumable_write.write_shard, 0

    def faulty(*args: Any) -> None:
        nonlocal count
        count += 1
        if rank == 1 and count == 2:
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "no space left")
        write(*args)

    resumable_write.write_shard = faulty if fault in ("dies", "fails") else write
    config = by_name("int4" if fault == "differs" and rank else "int8", None)
    said = Path(f"{dst}.{rank}")
    try:
        report = quantize_checkpoint(src, dst, config, max_shard_bytes=SIZE, ranks=True)
        said.write_text("\n".join(f"{r.name} {r.sqnr}" for r in report.rows))
    except (CheckpointError, OSError) as error:
        said.write_text(f"{type(error).__name__}: {error}")


def on_ranks(ranks: int, src: Path, dst: Path, fault: str = "") -> list[str]:
    """What each rank had to say at its end; "" for one that died."""
    context = mp.get_context(METHOD)
    meet = dst.parent / f"meet-{dst.name}-{fault}"
    processes = [
        context.Process(target=work, args=(r, ranks, str(meet), str(src), str(dst), fault)) for r in range(ranks)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
        assert p.exitcode is not None, "a rank waits for ever"
    said = [Path(f"{dst}.{r}") for r in range(ranks)]
    return [p.read_text() if p.exists() else "" for p in said]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_files_of_one_process(tmp_path: Path, ranks: int) -> None:
    src = source(tmp_path / "src")
    report = convert(src, tmp_path / "one")
    said = on_ranks(ranks, src, tmp_path / "many")
    assert said == ["\n".join(f"{r.name} {r.sqnr}" for r in report.rows)] * ranks
    assert snapshot(tmp_path / "many") == snapshot(tmp_path / "one")
    assert len(snapshot(tmp_path / "one")) == 6


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal on Windows")
def test_a_rank_that_dies_leaves_no_checkpoint_and_the_job_goes_on(tmp_path: Path) -> None:
    src, dst = source(tmp_path / "src"), tmp_path / "out"
    convert(src, tmp_path / "one")
    first, second = on_ranks(2, src, dst, "dies")
    assert "rank 0 lost rank 1" in first
    assert "rerun the same command to resume" in first
    assert second == ""
    left = snapshot(dst)
    assert "model.safetensors.index.json" not in left
    assert "quantize.progress.json" in left
    with pytest.raises(CheckpointError):
        pw.load(dst)
    for p in tmp_path.glob("out.*"):
        p.unlink()
    assert not any("Error" in text for text in on_ranks(2, src, dst))
    assert snapshot(dst) == snapshot(tmp_path / "one")


def test_an_error_on_one_rank_is_everyones(tmp_path: Path) -> None:
    src, dst = source(tmp_path / "src"), tmp_path / "out"
    first, second = on_ranks(2, src, dst, "fails")
    assert "rank 1 failed: OSError: [Errno 28] no space left" in first
    assert "no space left" in second
    assert "model.safetensors.index.json" not in snapshot(dst)
    convert(src, dst)  # one process goes on from there
    convert(src, tmp_path / "one")
    assert snapshot(dst) == snapshot(tmp_path / "one")
    nan = on_ranks(2, source(tmp_path / "nan", bad=True), tmp_path / "never")
    assert all("blocks.3.up.weight" in text and "NaN" in text for text in nan)


def test_ranks_of_different_jobs(tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    said = on_ranks(2, src, tmp_path / "out", "differs")
    assert all("ranks differ in the planned output" in text for text in said)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="start the program with torchrun"):
        convert(src, tmp_path / "out", ranks=True)


def test_torchrun(tmp_path: Path) -> None:
    src = source(tmp_path / "src")
    convert(src, tmp_path / "one")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "pennyweight", "quantize", src, tmp_path / "out", "--config", "int8", "--max-shard-size", "20kB"]
    run = forked.run([*torchrun, *command], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("parameters quantized") == 1
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "one")


def test_what_runs_a_model_is_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = ["quantize", str(tmp_path), str(tmp_path / "out"), "--config", "int8", "--algorithm", "gptq"]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 2
    assert "start without torchrun" in run.stderr
