"""DDP over a frozen quantized model, and models made equal over ranks."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import pennyweight as pw
import pennyweight.distributed as pwd
from pennyweight.core.formats import INT4
from tests.distributed.group import SOME, inputs, mlp, refuses, same_bits, spawn
from tests.distributed.test_fully_shard import LoRA

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(same_bits(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def two(mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank()
    for text in SOME:
        first = LoRA(mlp(text), 96)
        mine = LoRA(mlp(text, seed=rank), 96)
        if rank:
            assert not equal(mine, first)
        model = DistributedDataParallel(mine)
        assert equal(mine, first), text
        model(inputs(seed=rank)).sum().backward()
        assert mine.a.weight.grad is not None
        assert mine.base.up.weight.grad is None
        other = first if rank == 0 else copy.deepcopy(mine)
        other.zero_grad()
        for seed in range(2):
            other(inputs(seed=seed)).sum().div(2).backward()
        torch.testing.assert_close(mine.a.weight.grad, other.a.weight.grad)
    for text in SOME:
        model = mlp(text, seed=rank)
        pwd.broadcast_(model)
        assert equal(model, mlp(text)), text
    differs: Any = mlp(SOME[rank])
    refuses(ValueError, "ranks have different", lambda: pwd.broadcast_(differs))
    refuses(ValueError, "ranks differ in the model's state", lambda: pwd.broadcast_(mlp(hidden=32 + rank)))
    calibrated(mesh)


def calibrated(mesh: DeviceMesh) -> None:
    """Each rank learns from its share of the data, as under DDP, and all end with one model."""
    model = mlp()
    data = [inputs(40, seed=s) for s in range(4)]
    config = pw.SpecConfig(pw.QuantSpec(INT4, (16,)))
    pw.quantize_(model, config, calibration=data[mesh.get_local_rank() :: mesh.size()], algorithm="gptq")
    theirs = [torch.empty_like(model.down.weight.dequantize()) for _ in range(mesh.size())]
    dist.all_gather(theirs, model.down.weight.dequantize())
    assert all(torch.equal(t, theirs[0]) for t in theirs)
    alone = mlp()
    pw.quantize_(alone, config, calibration=data[:1], algorithm="gptq")
    assert not torch.equal(alone.down.weight.dequantize(), theirs[0])


def broken(mesh: DeviceMesh) -> None:
    """Rank 1 has another config: it says so instead of taking over codes of another meaning."""
    model = LoRA(mlp("pw.Int8WeightOnlyConfig()" if mesh.get_local_rank() == 0 else "pw.Float8WeightOnlyConfig()"), 96)
    if mesh.get_local_rank():
        refuses(ValueError, "ranks have different quantized tensors", lambda: DistributedDataParallel(model))
    else:
        DistributedDataParallel(model)


def test_two_ranks() -> None:
    spawn(two, 2)


def test_four_ranks_calibrate_one_model() -> None:
    spawn(calibrated, 4)


def test_ranks_of_different_configs() -> None:
    spawn(broken, 2)
