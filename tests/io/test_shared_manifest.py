"""Folders whose files all carry the same manifest, as writers do that hand every file the same metadata."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pennyweight.io import CheckpointError, flatten, load
from pennyweight.io.checkpoint import open_files
from tests.io.samples import Model, sample_model
from tests.io.test_native_format import assert_same


def divided(folder: Path, count: int = 3) -> dict[str, torch.Tensor]:
    """The sample model, its stored tensors dealt out to files one by one: parts of one tensor lie apart."""
    state = sample_model().state_dict()
    tensors, metadata = flatten(state)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    weight_map = {}
    for i, name in enumerate(names):
        share = {k: t for n, (k, t) in enumerate(tensors.items()) if n % count == i}
        save_file(share, folder / name, metadata)
        weight_map |= dict.fromkeys(share, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def test_it_is_read_as_one_checkpoint(tmp_path: Path) -> None:
    state = divided(tmp_path)
    held = load(tmp_path)
    assert held.keys() == state.keys()
    model = load(tmp_path, Model())
    for name, tensor in state.items():
        assert_same(tensor, held[name])
        assert_same(tensor, model.state_dict()[name])
    assert model.tied.weight is model.int4.weight
    with open_files(sorted(map(str, tmp_path.glob("*.safetensors")))) as checkpoint:
        assert checkpoint.manifest.tensors.keys() == {f"{n}.weight" for n in dict(model.named_children())} - {
            "tied.weight"
        }


def test_a_part_that_no_file_holds_is_missed(tmp_path: Path) -> None:
    divided(tmp_path, 2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    lone = tmp_path / "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if v == lone.name}}))
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path)


def test_one_that_is_changed_in_one_file_is_refused(tmp_path: Path) -> None:
    divided(tmp_path, 2)
    path = tmp_path / "model-00002-of-00002.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        share = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    other = metadata["pennyweight"].replace('"dtype":"float32"', '"dtype":"bfloat16"', 1)
    assert other != metadata["pennyweight"]
    save_file(share, path, {**metadata, "pennyweight": other})
    with pytest.raises(CheckpointError, match="is missing"):
        load(tmp_path)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"w": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="w: is in two files"):
        open_files([str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")])
