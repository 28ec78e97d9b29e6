"""Pooling of embedding models: sentence-transformers' files and the key of GGUF."""

import json
from pathlib import Path
from typing import Any

import pytest

from pennyweight.io.file import CheckpointError
from pennyweight.io.gguf.config import POOLING, kv_from_config, pooling_files, pooling_of
from tests.io.gguf.models import MODELS


def written(folder: Path, files: dict[str, Any]) -> str:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return str(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_comes_back(pooling: str, tmp_path: Path) -> None:
    kv = {k: v for k, (_, v) in kv_from_config(MODELS["bert"][1].to_dict(), 0, pooling=pooling).items()}
    assert kv["bert.pooling_type"] == POOLING[pooling]
    files = pooling_files(kv)
    assert json.loads(files["1_Pooling/config.json"])["word_embedding_dimension"] == 32
    assert pooling_of(written(tmp_path, files)) == pooling


MODULES = [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "x.Pooling", "path": "p"}]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "mean", "embedding_dimension": 3}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_files_of_older_and_newer_releases(config: dict[str, Any], pooling: str, tmp_path: Path) -> None:
    assert pooling_of(written(tmp_path, {"modules.json": MODULES, "p/config.json": config})) == pooling


def test_a_model_that_does_not_pool(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path)) is None
    assert pooling_of(written(tmp_path, {"modules.json": MODULES[:1]})) is None
    assert pooling_files({"general.architecture": "bert", "bert.embedding_length": 3}) == {}
    assert pooling_files({"general.architecture": ["bert"], "bert.pooling_type": 99}) == {}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"modules.json": {}}, "list of objects"),
        ({"modules.json": [3]}, "list of objects"),
        ({"modules.json": b"[{"}, "JSON"),
        ({"modules.json": [MODULES[1]] * 2}, "one folder"),
        ({"modules.json": [{"type": "Pooling", "path": 3}]}, "one folder"),
        ({"modules.json": [{"type": "Pooling", "path": "../.."}]}, "link that points outside|cannot be opened"),
        ({"modules.json": MODULES}, "cannot be opened"),
        ({"modules.json": MODULES, "p/config.json": []}, "must hold an object"),
        ({"modules.json": MODULES, "p/config.json": {"pooling_mode_max_tokens": True}}, "max_tokens.* not supported"),
        ({"modules.json": MODULES, "p/config.json": {"pooling_mode": ["mean", "max"]}}, "is not supported by GGUF"),
        ({"modules.json": MODULES, "p/config.json": {}}, "is not supported by GGUF"),
        ({"modules.json": b" " * (2 << 20)}, "larger than"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(files: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        pooling_of(written(tmp_path, files))
