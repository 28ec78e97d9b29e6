"""Tensors in mapped files: their values, what stays in memory, a full disk."""

import errno
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.calibration import disk_offload
from pennyweight.algorithms.calibration.disk_offload import copy_of, empty, offload_to, offload_weights_, offloaded
from tests import forked


def is_mapped(t: torch.Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split(" ")[0].split("-"))
        if low <= t.data_ptr() < high:
            return "mapped-" in line
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_copies_are_in_files_that_have_no_name(tmp_path: Path) -> None:
    large, small = torch.randn(200, 200), torch.randn(10)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        with offload_to(tmp_path):
            out = copy_of(large.to(dtype))
            assert is_mapped(out)
            assert not is_mapped(copy_of(small))
            strided = copy_of(large.t())  # of other strides: in memory, as it is
        assert torch.equal(out, large.to(dtype))
        assert torch.equal(strided, large.t())
        out.zero_()
        assert float(out.abs().sum()) == 0
    assert os.listdir(tmp_path) == []
    assert not is_mapped(copy_of(large))
    assert offloaded(large) is large
    assert large.abs().sum() > 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_weights_and_quantized_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_offload, "SMALL", 1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    weight, want = model[0].weight, model[0].weight.detach().clone()
    other = nn.Sequential(nn.Linear(64, 64))
    pw.quantize_(other, pw.Int4WeightOnlyConfig(group_size=32))
    with offload_to(tmp_path):
        offload_weights_(model)
        kept: Any = offloaded(other[0].weight.data)
    assert model[0].weight is weight
    assert model[1].weight is weight
    assert torch.equal(weight, want)
    assert is_mapped(weight.data)
    assert all(is_mapped(p) for p in kept.parts if isinstance(p, torch.Tensor))
    assert torch.equal(kept.dequantize(), other[0].weight.dequantize())


def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, start: int, count: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with offload_to(tmp_path), pytest.raises(OSError, match="No space left"):
        empty((1000, 1000), torch.float32, torch.device("cpu"))
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_cannot_reserve_gets_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, start: int, count: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with offload_to(tmp_path):
        out = empty((1000, 700), torch.float32, torch.device("cpu"))
    assert out.shape == (1000, 700)
    assert not out.any()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return it themselves")
def test_freed_memory_goes_back_to_the_system() -> None:
    code = """
import re, torch
from pennyweight.algorithms.calibration.disk_offload import offload_to, trim_heap
def own():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
torch.ones(8 << 20, dtype=torch.uint8)  # from now on glibc keeps arrays of this size
start, arrays, small = own(), [], []
for _ in range(100):
    arrays.append(torch.ones(1 << 20, dtype=torch.uint8))
    small.append(torch.ones(1 << 16, dtype=torch.uint8))
arrays.clear()
trim_heap()
print(own() - start)
with offload_to("."):
    trim_heap()
print(own() - start)
"""
    kept, left = map(int, forked.run(["-c", code], check=True).stdout.split())
    assert kept > left + 50  # MB
    assert left < 20
