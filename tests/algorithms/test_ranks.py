"""Calibration data shared out over ranks: all end with the same model, which one rank with all the data has too."""

import copy
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pennyweight as pw
from tests.algorithms.models import blocks_only, llama, tokens

CONFIG = pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32))


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = llama()
    pw.quantize_(model, CONFIG, blocks_only, calibration=tokens(5)[rank::2], algorithm="gptq")
    torch.save({n: p.dequantize() for n, p in model.named_parameters() if blocks_only_name(n)}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def blocks_only_name(name: str) -> bool:
    return "proj" in name


def test_two_ranks(tmp_path: Path) -> None:
    mp.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1))
    assert first.keys() == second.keys()
    assert len(first) == 14
    assert all(torch.equal(first[n], second[n]) for n in first)
    whole, half = llama(), llama()
    pw.quantize_(whole, CONFIG, blocks_only, calibration=tokens(5), algorithm="gptq")
    pw.quantize_(half, CONFIG, blocks_only, calibration=tokens(5)[::2], algorithm="gptq")

    def far(model: torch.nn.Module) -> float:
        return sum(float((first[n] - copy.copy(model.get_parameter(n)).dequantize()).abs().sum()) for n in first)

    assert far(whole) < 0.02 * far(half)  # but for the order in which sums are taken
