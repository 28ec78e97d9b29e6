"""A mixture with its experts in one matrix each: quantized from disk to disk with data, in a memory limit."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pennyweight as pw
from pennyweight.algorithms.calibration import disk_offload
from pennyweight.algorithms.calibration.loop import BlockStatistics
from pennyweight.quantize import pipeline
from pennyweight.report.evaluation_inputs import load_folder
from tests.integrations.mixtures import mixture
from tests.integrations.small import assert_same_weights

CONFIG = pw.Int4WeightOnlyConfig(32)
SKIP = ["lm_head"]
# Below the largest weight and the statistics of a block, and above what one matrix takes
LOW = {"gptq": "350 kB", "auto": "560 kB", "bias": "300 kB"}


def batches() -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 36, dtype=torch.long)
    mask[0, :5] = 0  # a shorter text
    return [{"input_ids": torch.randint(99, (2, 36), generator=g), "attention_mask": mask} for _ in range(2)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over the data, of each block."""
    monkeypatch.setattr(disk_offload, "SMALL", 1 << 10)  # the weights of this model are small
    found: list[int] = []
    made = BlockStatistics.__init__

    def init(self: Any, some: Any, *rest: Any) -> None:
        found.append(len(some))
        made(self, some, *rest)

    monkeypatch.setattr(BlockStatistics, "__init__", init)
    return found


def run(src: Path, dst: Path, algorithm: str, limit: str, **how: Any) -> pw.Report:
    return pw.quantize_checkpoint(
        src, dst, CONFIG, calibration=batches(), algorithm=algorithm, skip=SKIP, max_memory=limit, **how
    )


@pytest.mark.parametrize("algorithm", LOW)
def test_the_result_is_that_in_memory(algorithm: str, tmp_path: Path, passes: list[int]) -> None:
    src = tmp_path / "float"
    mixture("Qwen3Moe").save_pretrained(src)
    model = load_folder(str(src))
    want = pw.quantize_(model, CONFIG, calibration=batches(), algorithm=algorithm, skip=SKIP)
    assert max(passes) <= 1
    for limit in ("1 GB", LOW[algorithm]):
        passes.clear()
        report = run(src, tmp_path / "files", algorithm, limit)
        assert (max(passes, default=1) > 1) == (limit != "1 GB" and algorithm != "bias")
        assert [(r.name, r.error, r.note) for r in report.rows] == [(r.name, r.error, r.note) for r in want.rows]
        solved = [row.error is not None for row in report.quantized if ".experts." in row.name]
        assert solved == [algorithm != "bias"] * 4
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "files")
        assert_same_weights(loaded, model)
        assert sorted(os.listdir(tmp_path)) == ["files", "float"]
        (tmp_path / "files").rename(tmp_path.parent / f"{tmp_path.name}-{len(passes)}-{limit[:3]}")
    planned = run(src, tmp_path / "files", algorithm, LOW[algorithm], dry_run=True)
    assert any("calibration with" in note for note in planned.notes)
    assert sorted(os.listdir(tmp_path)) == ["float"]


def test_a_run_that_stops_in_a_block_goes_on(tmp_path: Path, passes: list[int], monkeypatch: Any) -> None:
    src, solve, calls = tmp_path / "float", pipeline.solve_in_model, []
    mixture("Qwen3Moe").save_pretrained(src)

    def stop(model: Any, row: Any, *rest: Any) -> Any:
        calls.append(row.name)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return solve(model, row, *rest)

    run(src, tmp_path / "whole", "gptq", LOW["gptq"])
    monkeypatch.setattr(pipeline, "solve_in_model", stop)
    with pytest.raises(KeyboardInterrupt):
        run(src, tmp_path / "files", "gptq", LOW["gptq"])
    calls[:] = [""] * 9
    run(src, tmp_path / "files", "gptq", LOW["gptq"])
    assert [name.split(".")[2] for name in calls[9:]] == ["1"] * 6  # only the second block
    load = partial(transformers.AutoModelForCausalLM.from_pretrained)
    assert_same_weights(load(tmp_path / "files"), load(tmp_path / "whole"))
