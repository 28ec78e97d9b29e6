"""max_ram: hidden states go to disk where they would not fit; statistics are collected in several passes, and those of
one weight that do not fit are refused."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.calibration.loop import parse_bytes
from pennyweight.planning.config_resolution import PlanError
from tests.algorithms.models import blocks_only, llama, tokens

INT3 = pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32))


@pytest.mark.parametrize(
    ("text", "n"), [("4 GB", 4e9), ("1.5MB", 1.5e6), ("20 kB", 2e4), ("7 B", 7), (100, 100), ("2 MiB", 2**21)]
)
def test_amounts(text, n) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "4 XB", "0 GB", "-1 MB", "1e3 MB", True, None, -3])
def test_no_amounts(text) -> None:
    with pytest.raises(PlanError, match="a memory limit is"):
        parse_bytes(text)


@pytest.mark.parametrize("algorithm", ["gptq", "gptaq"])
def test_on_disk_as_in_memory(algorithm, monkeypatch) -> None:
    model, batches = llama(), tokens(4)
    kept, outs = [], []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda x, to: (kept.append(Path(to).name), save(x, to)))
    for limit in (None, "10 MB", "360 kB" if algorithm == "gptaq" else "250 kB", "140 kB"):
        kept.clear()
        q = copy.deepcopy(model)
        pw.quantize_(q, INT3, blocks_only, calibration=batches, algorithm=algorithm, max_ram=limit)
        outs.append(q(batches[0]).logits)
        assert bool(kept) == (limit not in (None, "10 MB")), limit
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[0], outs[3])


def test_statistics_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(
        PlanError,
        match=r"0\.mlp\.down_proj\.weight: the statistics of its inputs take 65.5 kB, .* leaves 50 kB for them;",
    ):
        pw.quantize_(llama(), INT3, blocks_only, calibration=tokens(), algorithm="gptq", max_ram="50 kB")


class Adding(nn.Module):
    """A block that writes its output into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.down(torch.tanh(self.up(x))))


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(64, 64), nn.Sequential(*(Adding() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.first(x))


def test_a_block_that_writes_into_its_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Adder()
    batches, outs = [torch.randn(40, 64) for _ in range(3)], []
    for spill in (None, tmp_path):  # on disk each run reads its own copy
        q = copy.deepcopy(model)
        pw.quantize_(q, INT3, calibration=batches, algorithm="gptaq", spill=spill)
        outs.append(q(batches[0]))
    assert torch.equal(*outs)
