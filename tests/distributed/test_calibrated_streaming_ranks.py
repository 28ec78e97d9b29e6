"""Algorithms on weights in files, shared by ranks: the bytes of one process, for any number of them."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

import pennyweight as pw
from pennyweight.io.calibrated_streaming import STATE
from tests.distributed.group import METHOD, refuses, run_until_killed, spawn

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
CONFIG = pw.Int4WeightOnlyConfig(group_size=32)
RECIPES: dict[str, Any] = {
    "hqq": "hqq",  # needs no data; the table that is looked up too is compared on some
    "steps": ["smooth", {"rotate": {"held_out": 0.0}}, "gptaq", {"reconstruct": {"steps": 2}}],
}


def batches() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(64, (2, 12), generator=g)} for _ in range(5)]


def write_model(folder: Path) -> Path:
    """A tied Llama with three blocks."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(src: str | Path, dst: str | Path, algorithm: Any, **how: Any) -> pw.Report:
    filled = {"calibration": batches(), "progress": False} | how
    return pw.quantize_checkpoint(src, dst, CONFIG, algorithm=algorithm, **filled)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def all_recipes(mesh: DeviceMesh, src: str, out: str) -> None:
    for name, algorithm in RECIPES.items():
        report = run(src, f"{out}/{name}", algorithm, ranks=True)
        assert report.quantized, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_bytes_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    src, threads = write_model(tmp_path / "float"), torch.get_num_threads()
    torch.set_num_threads(1)  # sums of a product are split by threads
    try:
        for name, algorithm in RECIPES.items():
            run(src, tmp_path / "one" / name, algorithm)
    finally:
        torch.set_num_threads(threads)
    spawn(all_recipes, ranks, str(src), str(tmp_path / "ranks"))
    for name in RECIPES:
        assert snapshot(tmp_path / "ranks" / name) == snapshot(tmp_path / "one" / name), name


def one_is_wrong(mesh: DeviceMesh, src: str, out: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()

    def stop(done: int, total: int, name: str) -> None:
        if done == 6:
            raise ValueError("a disk broke")

    text = "a disk broke" if rank == 0 else "rank 0 failed: ValueError: a disk broke"
    kind = ValueError if rank == 0 else pw.CheckpointError
    refuses(kind, text, lambda: run(src, f"{out}/stopped", "gptq", ranks=True, progress=stop))
    other = batches()[: 5 - rank]
    text = "is of another run: data differ"
    refuses(
        (pw.CheckpointError, ValueError),  # type: ignore[arg-type]
        text, lambda: run(src, f"{out}/other", "gptq", ranks=True, calibration=other),
    )  # fmt: skip
    assert size == 2
    run(src, f"{out}/stopped", "gptq", ranks=True)  # continues


def test_an_error_of_one_rank_stops_all_and_the_run_continues(tmp_path: Path) -> None:
    src = write_model(tmp_path / "float")
    spawn(one_is_wrong, 2, str(src), str(tmp_path / "out"))
    run(src, tmp_path / "whole", "gptq")
    assert snapshot(tmp_path / "out" / "stopped") == snapshot(tmp_path / "whole")


def killed(rank: int, meet: str, src: str, dst: str, at: int) -> None:
    run_until_killed(rank, meet, at, f"{dst}.error", lambda: run(src, dst, "gptq", ranks=True))


def test_a_rank_that_dies_stops_the_others(tmp_path: Path) -> None:
    src = write_model(tmp_path / "float")
    run(src, tmp_path / "whole", "gptq")
    out = tmp_path / "out"
    arguments = (str(tmp_path / "meet"), str(src), str(out), 14)
    both = mp.start_processes(killed, arguments, 2, join=False, start_method=METHOD)
    deadline = time.monotonic() + 120
    while any(p.is_alive() for p in both.processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "lost rank 1" in Path(f"{out}.error").read_text()
    assert list((out / STATE).glob("solved-*.safetensors"))
    run(src, out, "gptq")  # one process continues what two began
    assert snapshot(out) == snapshot(tmp_path / "whole")
