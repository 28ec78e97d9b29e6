"""A search shared by ranks: the losses, the mixture and the files of one process, for any number of them."""

import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

import pennyweight as pw
from pennyweight.algorithms.mixed_precision import sensitivity
from pennyweight.core.spec import QuantSpec
from tests.algorithms.models import blocks_only, llama, padded_tokens, t5, tokens
from tests.distributed.group import METHOD, refuses, run_until_killed, spawn

pytest.importorskip("scipy")
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
FEW = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{b}"), (32,), torch.float16)) for b in (2, 3, 4)]
MODULE = import_module("pennyweight.algorithms.mixed_precision.search")  # its name in the package is the function's


def found(folder: str | Path | None = None, budget: str = "3.5 bpw", **more: Any) -> pw.algorithms.Search:
    how: dict[str, Any] = {"candidates": FEW, "filter_fn": blocks_only, "max_memory": "1 GB", "progress": False}
    torch.manual_seed(0)
    return pw.search(llama(2), tokens(5), budget, resume=folder, **how | more)


def whole_runs(folder: str | Path | None = None, **more: Any) -> pw.algorithms.Search:
    """Of a model whose blocks cannot be run alone."""
    batches = [{**batch, "decoder_input_ids": batch["input_ids"][:, :5]} for batch in padded_tokens()]
    how: dict[str, Any] = {"candidates": FEW, "algorithm": "nearest", "progress": False}
    torch.manual_seed(0)
    return pw.search(t5(), batches, "3 bpw", resume=folder, **how | more)


def everything(search: pw.algorithms.Search) -> tuple[Any, ...]:
    return search.to_json(), search.uniform, search.table, search.chosen


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums of a product are split by threads
    try:
        return everything(found()), everything(whole_runs())
    finally:
        torch.set_num_threads(threads)


def both(mesh: DeviceMesh, out: str, want: tuple[Any, Any]) -> None:
    solved, measured, names = 0, 0, list[str]()
    solve, run = MODULE.solve_in_model, sensitivity.Chain.measure

    def counted(*of: Any) -> Any:
        nonlocal solved
        solved += 1
        return solve(*of)

    def measuring(self: Any, b: int, values: Any) -> Any:
        nonlocal measured
        measured += len(values)
        return run(self, b, values)

    MODULE.solve_in_model, sensitivity.Chain.measure = counted, measuring  # type: ignore[attr-defined]
    try:
        got = found(f"{out}/blocks", ranks=True, progress=lambda done, total, name: names.append(name))
    finally:
        MODULE.solve_in_model, sensitivity.Chain.measure = solve, run  # type: ignore[attr-defined]
    assert everything(got) == want[0]
    assert everything(whole_runs(f"{out}/whole", ranks=True)) == want[1]
    total, size = len(got.table), dist.get_world_size()
    counts: list[Any] = [None] * size
    dist.all_gather_object(counts, (solved, measured))
    assert [sum(some) for some in zip(*counts, strict=True)] == [3 * total, 3 * total]  # none twice
    assert max(measured for _, measured in counts) <= 3 * total / size + 2
    assert len(names) == (2 * total if dist.get_rank() == 0 else 0)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_result_is_that_of_one_process(ranks: int, alone: Any, tmp_path: Path) -> None:
    spawn(both, ranks, str(tmp_path), alone)
    assert everything(found(tmp_path / "blocks", algorithm="gptq")) == alone[0]  # one process reads what they wrote
    assert {path.suffix for path in (tmp_path / "blocks").iterdir()} == {".json", ".search"}


def one_is_wrong(mesh: DeviceMesh, out: str, want: Any) -> None:
    rank = dist.get_rank()

    def stop(done: int, total: int, name: str) -> None:
        if name.startswith("measuring") and done == 9:
            raise ValueError("a disk broke")

    text = "a disk broke" if rank == 0 else "rank 0 failed: ValueError: a disk broke"
    kind = ValueError if rank == 0 else pw.CheckpointError
    refuses(kind, text, lambda: found(f"{out}/stopped", ranks=True, progress=stop))
    both_kinds: Any = (pw.CheckpointError, ValueError)
    refuses(
        both_kinds, "is of another run: recipe differ",
        lambda: found(f"{out}/other", ranks=True, held_out=0.25 + rank / 4),
    )  # fmt: skip
    refuses(pw.PlanError, "a budget of time is measured by one process", lambda: found(out, "2x latency", ranks=True,
            max_memory=None))  # fmt: skip
    solve = MODULE.solve_in_model
    MODULE.solve_in_model = None  # type: ignore[attr-defined]
    try:
        assert everything(found(f"{out}/stopped", ranks=True)) == want  # continues: all weights have been solved
    finally:
        MODULE.solve_in_model = solve  # type: ignore[attr-defined]


def test_an_error_of_one_rank_stops_all_and_the_search_continues(alone: Any, tmp_path: Path) -> None:
    spawn(one_is_wrong, 2, str(tmp_path), alone[0])


def killed(rank: int, meet: str, folder: str, at: int) -> None:
    run_until_killed(rank, meet, at, f"{folder}.error", lambda: found(folder, ranks=True))


@pytest.mark.parametrize("at", [8, 20])  # while weights are solved, and losses measured
def test_a_rank_that_dies_stops_the_others(at: int, alone: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    processes = mp.start_processes(
        killed, (str(tmp_path / "meet"), str(folder), at), 2, join=False, start_method=METHOD
    )
    deadline = time.monotonic() + 120
    while any(p.is_alive() for p in processes.processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "rank 0 lost rank 1" in Path(f"{folder}.error").read_text()
    assert list(folder.glob("solved-*.search"))
    left = [path for path in folder.iterdir() if path.is_dir()]
    assert everything(found(folder)) == alone[0]  # one process continues what two began
    assert not any(path.exists() for path in left)


def test_ranks_need_a_folder_and_a_group(tmp_path: Path) -> None:
    with pytest.raises(pw.PlanError, match="ranks=True needs resume=folder, which all ranks see"):
        found(ranks=True)
    with pytest.raises(ValueError, match="start the program with torchrun"):
        found(tmp_path, ranks=True)
