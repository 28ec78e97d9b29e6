"""Tied weights and shared modules through files: the file's ties are made, the model's are kept."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from pennyweight.io import CheckpointError, load, save
from tests.io.test_loading import Net


def test_ties_of_the_file_are_made_in_an_untied_model(tmp_path: Path) -> None:
    save(Net(), tmp_path)
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(20, 64))
    load(tmp_path, model)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("stored", ["head.weight", "embed.weight"])
def test_a_tied_model_takes_the_one_name_that_is_stored(stored: str, tmp_path: Path) -> None:
    state = {k: v for k, v in Net().state_dict().items() if k not in ("head.weight", "embed.weight") or k == stored}
    safetensors.torch.save_file({k: v.clone() for k, v in state.items()}, tmp_path / "model.safetensors")
    model = load(tmp_path, Net())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, state[stored])


def test_equal_copies_stay_tied_and_different_ones_do_not(tmp_path: Path) -> None:
    state = {k: v.clone() for k, v in Net().state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = load(tmp_path, Net())
    assert model.head.weight is model.embed.weight
    state["head.weight"] += 1
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    model = load(tmp_path, Net())
    assert torch.equal(model.head.weight, model.embed.weight + 1)


def test_a_shared_module_cannot_hold_two_values(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    shared = nn.Sequential(layer, layer)
    save(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"one tensor of a shared module"):
        load(tmp_path / "two", shared)
    save(shared, tmp_path / "one")
    fresh = nn.Linear(4, 4)
    load(tmp_path / "one", nn.Sequential(fresh, fresh))
    assert torch.equal(fresh.weight, layer.weight)
