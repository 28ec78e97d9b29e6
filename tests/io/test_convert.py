"""From format to format: what is exact is exact, what is not is told, and a stopped job goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io import output_formats as targets_module
from pennyweight.io.replace_checkpoint import PROGRESS
from tests.io.test_native_format import assert_same
from tests.io.test_quantize_files import CONFIGS, Net, contents


@pytest.fixture(params=["int8", "nested", "int4"])
def quantized(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = Net().bfloat16()
    config = pw.Int4WeightOnlyConfig(32) if request.param == "int4" else CONFIGS[request.param]
    pw.quantize_(model, config)
    pw.save(model, tmp_path / "src", max_shard_bytes=9000)
    (tmp_path / "src" / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": {"a": 1}}))
    (tmp_path / "src" / "tokenizer.json").write_text("{}")
    return tmp_path / "src"


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if isinstance(tensor, QT):
            assert_same(tensor, b[name])
        else:
            assert torch.equal(tensor, b[name]), name


def test_native_to_native_in_other_shards_is_exact(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets_module, "ROWS_NUMEL", 300)  # so that a weight is written in many pieces
    monkeypatch.setattr(targets_module, "COPY_BYTES", 256)
    report = pw.convert(quantized, tmp_path / "dst", max_shard_bytes=5000)
    same(pw.load(quantized), pw.load(tmp_path / "dst"))
    assert len(list((tmp_path / "dst").glob("*.safetensors"))) > 2
    assert {r.note for r in report.quantized} == {"exact"}
    assert {r.sqnr for r in report.quantized} == {float("inf")}
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "pennyweight"
    assert (tmp_path / "dst" / "tokenizer.json").exists()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_to_float_is_dequantize(quantized: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    report = pw.convert(quantized, tmp_path / "dst", to="float", dtype=dtype)
    before, after = pw.load(quantized), pw.load(tmp_path / "dst")
    assert before.keys() == after.keys()
    for name, w in before.items():
        value = w.dequantize(torch.float32) if isinstance(w, QT) else w
        assert torch.equal(after[name], value.to(dtype or torch.bfloat16)), name
    assert "quantization_config" not in json.loads((tmp_path / "dst" / "config.json").read_text())
    rows = {r.name: r for r in report.rows}
    for name, w in before.items():
        if isinstance(w, QT):
            assert rows[name].note.startswith("dequantized from")
            assert rows[name].sqnr is not None
            assert rows[name].sqnr > 45, name


def test_a_float_that_does_not_fit_is_told(tmp_path: Path) -> None:
    pw.save({"a.weight": torch.full((4, 4), 1e30)}, tmp_path / "src.safetensors")
    with pytest.raises(
        CheckpointError, match=r"a.weight: has values outside the range of torch.float16; choose another dtype"
    ):
        pw.convert(tmp_path / "src.safetensors", tmp_path / "dst", to="float", dtype=torch.float16)


def test_stopped_and_resumed_gives_the_same_bytes(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pw.convert(quantized, tmp_path / "whole", max_shard_bytes=5000)
    seen: list[str] = []

    def stop(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pw.convert(quantized, tmp_path / "dst", max_shard_bytes=5000, progress=stop)
    assert (tmp_path / "dst" / PROGRESS).exists()
    pw.convert(quantized, tmp_path / "dst", max_shard_bytes=5000)
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_dry_run_writes_nothing(quantized: Path, tmp_path: Path) -> None:
    report = pw.convert(quantized, tmp_path / "dst", to="float", dry_run=True)
    assert report.rows
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "nonsense"}, "to='nonsense': cannot write this format; writable formats: pennyweight, float, gguf"),
        ({"to": "float", "dtype": torch.int8}, "dtype must be a floating-point dtype such as .*, got torch.int8"),
        ({"dtype": torch.float16}, "is only valid with to='float'"),
        ({"gguf_type": "Q4_K"}, "gguf_type='Q4_K' is only valid with to='gguf', not 'pennyweight'"),
    ],
)
def test_wrong_words_are_refused(quantized: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pw.convert(quantized, tmp_path / "dst", **options)


def test_the_source_is_not_written_over(quantized: Path) -> None:
    with pytest.raises(CheckpointError, match="is the folder of the source"):
        pw.convert(quantized, quantized)


def test_open_is_a_mapping_that_reads_nothing(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pennyweight.io.safetensors_file import File

    expected = pw.load(quantized)
    with pw.open(quantized) as checkpoint:
        assert set(checkpoint) == expected.keys()
        assert len(checkpoint) == len(expected)
        name = next(iter(checkpoint.quantized))
        assert checkpoint.quantized[name].shape == tuple(expected[name].shape)
        assert_same(checkpoint[name], expected[name])
        assert checkpoint.format == "pennyweight"
        assert "no such" not in checkpoint
        with pytest.raises(KeyError):
            checkpoint["no such"]

        def refuse(self: File, *args: Any) -> None:
            raise AssertionError(f"read {args}")

        monkeypatch.setattr(File, "tensor", refuse)
        monkeypatch.setattr(File, "read", refuse)
        assert name in checkpoint
        assert str(len(checkpoint.held)) in repr(checkpoint)
        assert checkpoint == checkpoint  # noqa: PLR0124 - Mapping's own comparison would read everything


@pytest.mark.parametrize(("config", "twice"), [(None, True), ({"tie_word_embeddings": False}, True), ({}, False)])
def test_two_names_of_a_tensor(config: dict[str, Any] | None, twice: bool, tmp_path: Path) -> None:
    """Formats without aliases store a tensor twice, unless its config may tie the two."""
    w = QT.from_float(torch.randn(64, 128), pw.QuantSpec(pw.get_format("int8"), (-1,)))
    pw.save({"embed.weight": w, "head.weight": w}, tmp_path / "src")
    if config is not None:
        (tmp_path / "src" / "config.json").write_text(json.dumps(config))
    for to in ("float", "compressed-tensors"):
        report = pw.convert(tmp_path / "src", tmp_path / to, to=to)
        state = pw.load(tmp_path / to)
        assert state.keys() == ({"embed.weight", "head.weight"} if twice else {"embed.weight"})
        assert [r.name for r in report.rows] == list(state)
        assert torch.equal(state["embed.weight"].dequantize(), w.dequantize())
    pw.convert(tmp_path / "src", tmp_path / "own")
    state = pw.load(tmp_path / "own")
    assert state["embed.weight"] is state["head.weight"]


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_says_the_dtype_that_is_written(key: str, quantized: Path, tmp_path: Path) -> None:
    (quantized / "config.json").write_text(json.dumps({key: "bfloat16"}))
    for name, dtype in (("a", None), ("b", torch.float16)):
        pw.convert(quantized, tmp_path / name, to="float", dtype=dtype)
        said = {key: "bfloat16" if dtype is None else "float16"}
        assert json.loads((tmp_path / name / "config.json").read_text()) == said


def test_floats_alone_are_not_called_ours(tmp_path: Path) -> None:
    pw.save({"a.weight": torch.randn(4, 4)}, tmp_path / "src")
    (tmp_path / "src" / "config.json").write_text("{}")
    pw.convert(tmp_path / "src", tmp_path / "dst")
    assert json.loads((tmp_path / "dst" / "config.json").read_text()) == {}
