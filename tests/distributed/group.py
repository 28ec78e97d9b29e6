"""Processes that speak by gloo, and what they try: one group for many checks, because starting costs seconds."""

import os
import re
import signal
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.distributed.rank_check import part_tensors
from pennyweight.distributed.rank_group import RankGroup
from tests.every.test_configs import CASES as ALL
from tests.every.test_configs import build as built

CASES = [text.replace("'0'", "'up'").replace("'re:2'", "'re:down'") for text in ALL]
DYNAMIC = [text for text in CASES if "Dynamic" in text]
SOME = [
    "pw.Int8WeightOnlyConfig()",
    "pw.Int8WeightOnlyConfig(granularity=pw.PerTensor())",
    "pw.Int4WeightOnlyConfig(group_size=32)",
    "pw.Float8WeightOnlyConfig(granularity=pw.PerBlock((16, 16)))",
    "pw.NVFP4WeightOnlyConfig()",
    "pw.NF4WeightOnlyConfig()",
    "pw.UIntXWeightOnlyConfig(torch.uint2, group_size=32)",
    "pw.CodebookWeightOnlyConfig(bits=3, dim=1, group_size=32)",
    "pw.Int8DynamicActivationInt8WeightConfig()",
]
IN, HIDDEN = 96, 128
METHOD = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
if METHOD == "forkserver":  # torch is imported once, not by each process
    modules = ["torch.distributed.fsdp", "pennyweight.distributed", __name__, "tests.distributed.preloaded"]
    mp.get_context(METHOD).set_forkserver_preload(modules)


class MLP(nn.Module):
    def __init__(self, inputs: int = IN, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def build(text: str) -> pw.AOBaseConfig:
    return built(text)


def mlp(text: str = "", seed: int = 0, inputs: int = IN, hidden: int = HIDDEN) -> MLP:
    """A quantized MLP, the same on each rank that gives the same seed."""
    torch.manual_seed(seed)
    model = MLP(inputs, hidden).eval()
    if text:
        pw.quantize_(model, build(text))
    return model


def inputs(rows: int = 7, seed: int = 9, width: int = IN) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in every stored bit, packing aside."""
    if not isinstance(a, QT) or not isinstance(b, QT):
        return type(a) is type(b) and torch.equal(a, b)
    a, b = a.to_layout("plain"), b.to_layout("plain")
    parts = zip(part_tensors(a), part_tensors(b), strict=True)
    return (a.spec, a.act, a.shape) == (b.spec, b.act, b.shape) and all(torch.equal(p, q) for p, q in parts)


def spawn(work: Callable[..., None], ranks: int, *args: Any) -> None:
    """work(mesh, *args) on each of so many ranks; the first that raises ends all, and is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_start, (ranks, str(Path(folder, "meet")), work, args), ranks, start_method=METHOD)


def _start(rank: int, ranks: int, meet: str, work: Callable[[DeviceMesh], None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", pw.FallbackWarning)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    try:
        work(init_device_mesh("cpu", (ranks,)), *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def refuses(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    """Assert that a call raises, with those words; for use inside a rank."""
    with pytest.raises(kind, match=re.escape(words)):
        call()


def run_until_killed(rank: int, meet: str, at: int, error: str, run: Callable[[], object]) -> None:
    """One of two ranks: ``run``, in which rank 1 is killed at the start of its step number ``at``. What the other is
    told is written to the file ``error``. Ends the process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    count = 0
    step = RankGroup.step

    def counted(self: Any, work: Any) -> Any:
        nonlocal count
        count += 1
        if rank == 1 and count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, work)

    RankGroup.step = counted  # type: ignore[method-assign]
    try:
        run()
    except pw.CheckpointError as found:
        Path(error).write_text(str(found))
    os._exit(0)
