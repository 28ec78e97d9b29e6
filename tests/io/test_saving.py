"""Saving: shards, names, whole files or none, and what cannot be stored."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError, load, save
from pennyweight.io.safetensors_file import Writer
from tests.io.samples import Model, sample_folder, sample_model
from tests.io.test_native_format import assert_same

INT8_ROW = QuantSpec(INT8, (-1,))


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


def test_shards_hold_whole_tensors_and_the_index_names_them(tmp_path: Path) -> None:
    model = sample_model()
    save(model, tmp_path, max_shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert set(files(tmp_path)) == {*names, "model.safetensors.index.json"}
    home: dict[str, set[str]] = {}
    total = 0
    for stored, name in index["weight_map"].items():
        home.setdefault(stored.split(".weight.")[0], set()).add(name)
    for part, shards in home.items():
        assert len(shards) == 1, part
    for name in names:
        shard = load(tmp_path / name)
        size = sum(t.nbytes for n, t in shard.items() if n != "tied.weight")
        total += size
        assert size <= 1000 or len(shard) <= 2
    assert index["metadata"]["total_size"] == total
    out = load(tmp_path, Model())
    for name, tensor in load(sample_folder(tmp_path)).items():
        assert_same(tensor, out.state_dict()[name])
    assert out.tied.weight is out.int4.weight


def test_a_smaller_checkpoint_replaces_a_larger_one_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-of-my-own.safetensors").write_text("mine")
    save(sample_model(), tmp_path, max_shard_bytes=500)
    many = len(files(tmp_path))
    save(sample_model(), tmp_path, max_shard_bytes=1500)
    assert len(files(tmp_path)) < many
    assert load(tmp_path, Model()).steps == 3
    kept = {"config.json", "model-of-my-own.safetensors"}
    save(sample_model(), tmp_path)
    assert set(files(tmp_path)) == {"model.safetensors", *kept}
    save(sample_model(), tmp_path, max_shard_bytes=1500)
    assert "model.safetensors" not in files(tmp_path)
    assert load(tmp_path, Model()).steps == 3


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1000], ids=["one file", "shards"])
@pytest.mark.parametrize("broken", ["put", "finish", "replace"])
def test_an_error_while_writing_leaves_what_was_there(
    broken: str, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the second tensor, at the end of the first file, or at the first rename."""
    old, new = tmp_path / "old", tmp_path / "new"
    save(nn.Linear(2, 2), old)
    before = files(old)
    put, calls = Writer.put, []

    def fail(*args: Any) -> None:
        calls.append(args)
        if broken == "put" and len(calls) % 2:
            return put(*args)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "replace", fail) if broken == "replace" else (Writer, broken, fail)))
    for folder in (old, new):
        with pytest.raises(OSError, match="No space left"):
            save(sample_model(), folder, max_shard_bytes=shard_bytes)
    assert calls
    assert files(old) == before
    assert not new.exists()


def test_a_value_that_cannot_be_stored_leaves_no_file(tmp_path: Path) -> None:
    w = QT.from_float(torch.randn(4, 8), INT8_ROW)
    assert w.scale is not None
    w.scale[1] = float("nan")
    state = {"good": torch.randn(100), "bad": w}
    for path in (tmp_path / "folder", tmp_path / "file.safetensors"):
        with pytest.raises(CheckpointError, match=r"bad: cannot be stored: .*1 of 4 values are NaN"):
            save(state, path)
    assert list(tmp_path.iterdir()) == []


SMALL = QT.from_float(torch.ones(2, 4), INT8_ROW)
STATIC = ActivationSpec(QuantSpec(INT8, None), "static")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"x": 3}, "x: is a int; only tensors"),
        ({"x": nn.Linear(1, 1)}, "only tensors"),
        ({"x": torch.zeros(2, device="meta")}, "meta device"),
        ({"x": nn.UninitializedParameter()}, "lazy"),
        ({"x": torch.zeros(2).to_sparse()}, "dense"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, "no dtype for torch.complex128"),
        ({"a..b": torch.zeros(2)}, "empty part"),
        ({"": torch.zeros(2)}, "1 to 1024"),
        ({"x\n": torch.zeros(2)}, "control characters"),
        ({"w": SMALL, "w.scale": torch.ones(2, 1)}, "stored name w.scale is used"),
        ({"w": SMALL, "w.offset": torch.ones(2, 1)}, "unexpected part w.offset"),
        ({"w": SMALL, "w.b": SMALL.clone()}, "is nested in"),
        ({"w": SMALL.with_(act=STATIC)}, "calibrate it first"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_says_so(state: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        save(state, tmp_path / "out")
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_ones_own(tmp_path: Path) -> None:
    for bad in ({"pennyweight": "x"}, {"format": "pt"}, {"a": 1}):
        with pytest.raises(CheckpointError, match="metadata"):
            save(nn.Linear(2, 2), tmp_path / "out", metadata=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save(nn.Linear(2, 2), tmp_path / "out", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_the_file_is_replaced_not_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.write_text("precious")
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(outside)
    save(nn.Linear(2, 2), folder)
    assert outside.read_text() == "precious"
    assert not (folder / "model.safetensors").is_symlink()
    assert load(folder).keys() == {"weight", "bias"}


def test_a_single_file_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    save(sample_model(), tmp_path, max_shard_bytes=1000)
    before = files(tmp_path)
    save(nn.Linear(2, 2), tmp_path / "other.safetensors")
    after = files(tmp_path)
    assert after.pop("other.safetensors")
    assert after == before


def test_permissions_are_those_of_any_file(tmp_path: Path) -> None:
    save(nn.Linear(2, 2), tmp_path)
    (tmp_path / "plain").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_ties_are_stored_once(tmp_path: Path) -> None:
    weight = QT.from_float(torch.randn(64, 64), QuantSpec(INT4, (32,)))
    bias = torch.randn(1000)
    save({"a": weight, "b": weight, "c": bias, "d": bias, "e": bias[:500], "f": bias.view(10, 100)}, tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < weight.nbytes + 2 * 4000 + 500 * 4 + 1500
    out = load(tmp_path)
    assert out["a"] is out["b"]
    assert out["c"] is out["d"]
    assert torch.equal(out["e"], bias[:500])
    assert torch.equal(out["f"], bias.view(10, 100))
