"""Checkpoints of torch.distributed, and FSDP2: each rank keeps and updates its own shard."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.optim import AdamW4bit, AdamW8bit
from tests.distributed.group import spawn
from tests.optim.models import Net, losses

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def resumed(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | str) -> list[float]:
    """Losses of the steps after a checkpoint, in a model and an optimizer that knew nothing of it."""
    room = states(model, optimizer)
    dcp.load(room, checkpoint_id=folder)
    model.load_state_dict(room["model"])
    set_optimizer_state_dict(model, optimizer, room["optimizer"])
    return losses(model, optimizer, range(4, 8))


@pytest.mark.parametrize("cls", [AdamW8bit, AdamW4bit])
def test_a_distributed_checkpoint_resumes_bit_for_bit(cls: Any, tmp_path: Path) -> None:
    """In one process, through the functions that trainers use."""
    model = Net()
    optimizer = cls(model.parameters(), lr=2e-3)
    losses(model, optimizer, range(4))
    dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
    wanted = losses(model, optimizer, range(4, 8))
    torch.manual_seed(5)
    model = Net()
    nn.init.ones_(model.up.weight)
    assert resumed(model, cls(model.parameters(), lr=1e-5), tmp_path) == wanted


def _shards(mesh: DeviceMesh, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def sharded() -> nn.Module:
        model = Net()
        fully_shard(model, mesh=mesh)
        return model

    # Rounding to the nearest depends on no rank: the same blocks, so the same bits as in one process.
    model = sharded()
    optimizer = AdamW8bit(model.parameters(), lr=2e-3)
    begun = losses(model, optimizer, range(4))
    for p in model.parameters():
        assert isinstance(p, DTensor)
        state = optimizer.state[p]["exp_avg_sq"]
        assert isinstance(state, DTensor)
        assert state.shape == p.shape
        assert state.to_local().shape == p.to_local().shape
        assert isinstance(state.to_local(), QT) == (p.numel() >= 4096)
    assert optimizer.memory().parameters == (2, 2)
    assert optimizer.memory().ratio < 0.27
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    wanted = losses(model, optimizer, range(4, 8))

    model = sharded()
    assert resumed(model, AdamW8bit(model.parameters(), lr=1e-5), folder) == wanted
    torch.save({"begun": begun, "wanted": wanted}, f"{folder}/losses-{mesh.get_rank()}.pt")


def test_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    """Shards hold their part of the states; a checkpoint of both resumes bit for bit; the training is that of one rank,
    but for which of its neighbours a second moment is rounded to."""
    spawn(_shards, 2, str(tmp_path))
    found = [torch.load(tmp_path / f"losses-{rank}.pt") for rank in range(2)]
    model = Net()
    alone = losses(model, AdamW8bit(model.parameters(), lr=2e-3), range(8))
    assert found[0] == found[1]  # both see all the data
    torch.testing.assert_close(
        torch.tensor(found[0]["begun"] + found[0]["wanted"]), torch.tensor(alone), rtol=2e-3, atol=0
    )
