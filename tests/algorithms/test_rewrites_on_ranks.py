"""Ranks with different data end with the same model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from pennyweight import SpecConfig, quantize_
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.distributed import all_reduce
from tests.distributed.group import METHOD

CONFIG = SpecConfig(QuantSpec(INT4, (16,)), ActivationSpec(QuantSpec(INT8, (-1,))))
RECIPE = [{"smooth": {"samples": 64}}, "awq", "nearest", {"bias": {"create": True}}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.norm, self.a, self.b = nn.RMSNorm(16), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.last, self.head = nn.RMSNorm(16), nn.Linear(16, 32, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(self.last(x + self.b(self.a(self.norm(x)).relu())))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


def ids(rank: int) -> list[torch.Tensor]:
    return [torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(rank))]


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name, recipe in (("scaled", RECIPE), ("rotated", ["rotate", "nearest"])):
        m = model()
        quantize_(m, CONFIG, calibration=ids(rank), algorithm=recipe)
        found[name] = {
            n: p.dequantize() if hasattr(p, "dequantize") and type(p) is not nn.Parameter else p.detach()
            for n, p in m.named_parameters()
        }
    assert all_reduce.union_names(["x", "y", "z"], ["z"] if rank == 0 else ["y", "x"]) == ["z", "x", "y"]
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_two_ranks_end_with_the_same_model(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(run, (str(tmp_path),), nprocs=2, start_method=METHOD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name in first:
        assert list(first[name]) == list(second[name])
        assert all(torch.equal(t, second[name][n]) for n, t in first[name].items())
    alone: Any = copy.deepcopy(model())
    quantize_(alone, CONFIG, calibration=ids(0), algorithm=RECIPE)
    assert not torch.equal(alone.b.bias, first["scaled"]["b.bias"])  # the other rank's data counts


def test_alone_nothing_is_exchanged() -> None:
    x = torch.randn(3)
    assert not all_reduce.is_distributed()
    assert all_reduce.reduce_max(x) is x
    assert all_reduce.reduce_sum(x) is x
    assert all_reduce.broadcast_batch(x) is x
    assert all_reduce.union_names(["a"], ["b"]) == ["b"]
