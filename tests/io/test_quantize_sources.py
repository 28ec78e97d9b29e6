"""quantize_checkpoint: what it makes of sources that are bad, unusual, or too large for the disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from pennyweight.cli.inspect import contents as inspected
from pennyweight.io import CheckpointError, load, quantize_checkpoint
from pennyweight.io import open as open_any
from pennyweight.quantize import PlanError, quantize_
from tests.io.test_native_format import assert_same
from tests.io.test_quantize_files import CONFIGS, contents, source


def write(folder: Path, state: dict[str, Tensor], config: Any = None) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(state, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def test_nan_names_the_tensor_and_the_rest_stays_for_resume(tmp_path: Path) -> None:
    bad = torch.randn(64, 64)
    bad[3, 4] = float("nan")
    src = write(tmp_path / "src", {"a.weight": torch.randn(64, 64), "b.weight": bad})
    with pytest.raises(CheckpointError, match=r"b\.weight: 1 of 4096 values are NaN or inf"):
        quantize_checkpoint(src, tmp_path / "dst", CONFIGS["int8"], max_shard_bytes=5000)
    assert {"model-00001-of-00002.safetensors", "quantize.progress.json"} == set(contents(tmp_path / "dst"))
    for read in (open_any, inspected, lambda path: load(path, torch.nn.Linear(8, 8))):
        with pytest.raises(CheckpointError, match=r"is unfinished.*run the same command again"):  # not: use a shard
            read(str(tmp_path / "dst"))


@pytest.mark.parametrize(
    ("state", "config", "said"),
    [
        ({"a.weight": torch.randn(8, 8)}, {"quantization_config": {"quant_method": "gptq"}}, "already quantized.*gptq"),
        ({"a.weight": torch.randn(8, 8)}, "[" * 3000, "config.json.*nested"),
        ({"a.weight": torch.randn(8, 8)}, "[]", "config.json.*object"),
        ({"a.forward": torch.randn(8, 8)}, None, "attribute of every module"),
    ],
)
def test_bad_sources_are_refused(state: dict[str, Tensor], config: Any, said: str, tmp_path: Path) -> None:
    src = write(tmp_path / "src", state, config)
    with pytest.raises(CheckpointError, match=said):
        quantize_checkpoint(src, tmp_path / "dst", CONFIGS["int8"])
    assert not (tmp_path / "dst").exists()


def test_nothing_to_quantize_is_an_error(tmp_path: Path) -> None:
    src = write(tmp_path / "src", {"norm.weight": torch.randn(8), "x.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)})
    with pytest.raises(PlanError, match="nothing would be quantized"):
        quantize_checkpoint(src, tmp_path / "dst", CONFIGS["int8"])


def test_no_room_on_the_disk_is_told_before_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source(tmp_path / "src")
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="are required, 1000 are free"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "dst", CONFIGS["int8"])
    assert not (tmp_path / "dst").exists()


def test_a_single_file_as_the_source(tmp_path: Path) -> None:
    model = source(tmp_path / "src", max_shard_bytes=1 << 30)
    quantize_checkpoint(tmp_path / "src" / "model.safetensors", tmp_path / "dst", CONFIGS["int8"])
    assert set(contents(tmp_path / "dst")) == {"model.safetensors"}
    quantize_(model, CONFIGS["int8"])
    for key, tensor in model.state_dict().items():
        assert_same(tensor, load(tmp_path / "dst")[key])
