"""Folders with experts one matrix each, float and quantized, in models that keep them in one parameter."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.calibration import disk_offload
from pennyweight.algorithms.calibration.disk_offload import offload_to
from pennyweight.io import weight_conversions
from pennyweight.io.meta_model import fresh_model
from tests.integrations.mixtures import mixture
from tests.integrations.small import assert_same_weights

QT = pw.AffineQuantizedTensor
INT4, INT8 = pw.Int4WeightOnlyConfig(32), pw.Int8WeightOnlyConfig()
NAMES = ("Mixtral", "Qwen3Moe", "DeepseekV3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in found.items():
        mixture(name).save_pretrained(folder)
    return found


def loaded(folder: Path, like: Path | None = None) -> Any:
    model = fresh_model(str(like or folder))
    return pw.load(folder, model).eval()


def experts(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.ndim == 3}


@pytest.mark.parametrize("name", NAMES)
def test_float_matrices_are_merged(name: str, folders: dict[str, Path]) -> None:
    with pw.open(folders[name]) as stored:
        assert any(".experts.3." in other for other in stored)
    model, want = loaded(folders[name]), mixture(name)
    assert len(experts(model)) >= 2
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in want.named_parameters()]
    for (n, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(p, q), n


def test_merged_matrices_are_in_files_if_asked_for(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_offload, "SMALL", 1 << 10)
    made: list[Path] = []
    mapped = disk_offload._mapped
    monkeypatch.setattr(disk_offload, "_mapped", lambda folder, count: (made.append(folder), mapped(folder, count))[1])
    with offload_to(tmp_path):
        model = loaded(folders["Mixtral"])
    assert made == [tmp_path] * 4
    assert not os.listdir(tmp_path)
    assert_same_weights(model, mixture("Mixtral"))


@pytest.mark.parametrize("config", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_matrices_quantized_one_by_one(name: str, config: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """By quantize_checkpoint without data, which keeps the tensors of the folder."""
    pw.quantize_checkpoint(folders[name], tmp_path / "out", config, skip=["lm_head"])
    with pw.open(tmp_path / "out") as stored:
        assert any(".experts.3." in other for other in stored.quantized)
    want = mixture(name)
    pw.quantize_(want, config, skip=["lm_head"])
    assert all(isinstance(w, QT) for w in experts(want).values())
    for model in (
        loaded(tmp_path / "out", folders[name]),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
    ):
        assert_same_weights(model, want)
        assert {n: w.spec.layout for n, w in experts(model).items()} == dict.fromkeys(experts(want), "cpu_experts")
    model.save_pretrained(tmp_path / "again")
    assert_same_weights(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), want)


def test_matrices_quantized_differently_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    table = pw.FqnToConfig({"*.experts.1.*": INT8, "*.experts.*": INT4, "_default": None})
    pw.quantize_checkpoint(folders["Qwen3Moe"], tmp_path / "two", table)
    text = (
        r"experts\.1\.\w+_proj\.weight: is int8.*, but .*experts\.0\.\w+_proj\.weight is uint4.*; Qwen3MoeForCausalLM "
    )
    text += "keeps them in one parameter: quantize the float checkpoint again, with one config for all of them"
    with pytest.raises(pw.CheckpointError, match=text):
        loaded(tmp_path / "two", folders["Qwen3Moe"])
    with pytest.raises(Exception, match="with one config for all of them"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    table = pw.FqnToConfig({"*.experts.1.*": None, "*.experts.*": INT4, "_default": None})
    pw.quantize_checkpoint(folders["Qwen3Moe"], tmp_path / "some", table)
    with pytest.raises(pw.CheckpointError, match="is not quantized, but"):
        loaded(tmp_path / "some", folders["Qwen3Moe"])


def test_a_missing_expert_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    state = pw.load(folders["Mixtral"])
    lost = next(name for name in state if ".experts.1." in name)
    del state[lost]
    pw.save(state, tmp_path / "short")
    text = r"gate_up_proj: cannot be made of what is stored \(3 of \.experts.*, 4 of \.experts.*\): Sizes"
    with pytest.raises(pw.CheckpointError, match=text):
        loaded(tmp_path / "short", folders["Mixtral"])
    for other in (".experts.1.w2.", ".experts.1.w3."):
        del state[next(name for name in state if other in name)]
    pw.save(state, tmp_path / "fewer")
    with pytest.raises(pw.CheckpointError, match=r"the model has shape \[4, \d+, \d+\], the checkpoint \[3, "):
        loaded(tmp_path / "fewer", folders["Mixtral"])


def test_experts_that_share_a_matrix(folders: dict[str, Path], tmp_path: Path) -> None:
    """A native file stores it once, under the name of the first."""
    state = pw.load(folders["Qwen3Moe"])
    first, second = (f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
    state[second] = state[first]
    pw.save(state, tmp_path / "shared")
    with pw.open(tmp_path / "shared") as stored:
        assert dict(stored.aliases) == {second: first}
    model = loaded(tmp_path / "shared", folders["Qwen3Moe"])
    down = model.get_parameter("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(down[0], down[1])
    assert torch.equal(down[2:], mixture("Qwen3Moe").get_parameter("model.layers.0.mlp.experts.down_proj")[2:])


def test_folders_of_other_libraries(folders: dict[str, Path], tmp_path: Path) -> None:
    """As llm-compressor writes them: each expert is a layer of its own."""
    config = pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32), scale_dtype=torch.float32)
    pw.quantize_checkpoint(folders["Qwen3Moe"], tmp_path / "ours", config, skip=["lm_head"])
    pw.convert(tmp_path / "ours", tmp_path / "theirs", to="compressed-tensors")
    model = loaded(tmp_path / "theirs", folders["Qwen3Moe"])
    want = loaded(tmp_path / "ours", folders["Qwen3Moe"])
    for n, w in experts(want).items():
        got = model.get_parameter(n)
        assert isinstance(got, QT)
        torch.testing.assert_close(got.dequantize(), w.dequantize(), rtol=1e-2, atol=1e-4)


def test_a_tied_model_needs_no_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=40,
        tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(weight_conversions, "conversions_of", lambda model: pytest.fail("looked them up"))
    loaded(tmp_path)
