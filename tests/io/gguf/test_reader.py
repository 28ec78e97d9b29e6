"""A GGUF file as users open it: tensors stay quantized, under its names or Hugging Face's, of one file or several."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.gguf_file import Writer
from pennyweight.io.gguf.metadata import Value
from pennyweight.io.gguf.reader import under_hf_names
from tests.io.gguf.models import MODELS, random
from tests.io.gguf.samples import QUANTIZED, random_raw

Raw = dict[str, tuple[str, tuple[int, ...], Tensor]]


def write(path: Path, tensors: Raw, **metadata: Value) -> None:
    kv = {"general.architecture": Value("string", "llama")} | {k.replace("__", "."): v for k, v in metadata.items()}
    writer = Writer(str(path), kv, {name: (TYPES[kind], shape) for name, (kind, shape, _) in tensors.items()})
    for name, (_, _, raw) in tensors.items():
        writer.put(name, raw)
    writer.finish()


def finite_raw(kind: str, shape: tuple[int, ...]) -> Tensor:
    """Raw rows whose float16 scales are numbers: what ggml or we quantized, or random where neither can."""
    rows = int(np.prod(shape[:-1]))
    t = TYPES[kind]
    if t.writable and not t.plain:
        from pennyweight.io.gguf.quantize import RULES, quantize

        if kind in RULES:
            return t.encode(quantize(torch.randn(rows, shape[-1]), kind), (rows, shape[-1]))
    while True:
        raw = random_raw(t, rows, shape[-1])
        blocks = raw.view(-1, t.nbytes)
        values = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(t.id)) if kind != "Q1_0" else 0
        if np.isfinite(values).all() and (
            kind != "Q1_0" or blocks[:, :2].contiguous().view(torch.float16).isfinite().all()
        ):
            return raw


def by_gguf(kind: str, raw: Tensor) -> np.ndarray:
    return gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(TYPES[kind].id))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # random scales that are NaN, in gguf
@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_tensor_of_each_type_stays_quantized_and_has_its_values(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    n = TYPES[kind].elements
    raw = finite_raw(kind, (6, n))
    write(tmp_path / "m.gguf", {"a.weight": (kind, (6, n), raw), "b.weight": (kind, (2, 3, n), raw)})
    with pw.open(tmp_path / "m.gguf") as checkpoint:
        assert (checkpoint.format, checkpoint.held["a.weight"].word) == ("gguf", kind)
        w = checkpoint["a.weight"]
        assert isinstance(w, QT)
        if kind != "Q1_0":
            assert torch.equal(w.dequantize(), torch.from_numpy(by_gguf(kind, raw)).reshape(6, n))
        for name, lead in (("a.weight", (6,)), ("b.weight", (2, 3))):
            rows = checkpoint.held[name].rows
            assert rows is not None
            pieces = [rows(i, i + 1).dequantize() for i in range(lead[0])]
            assert torch.equal(torch.cat(pieces).reshape(*lead, n), w.dequantize().reshape(*lead, n))
            assert checkpoint.held[name].nbytes == raw.numel()


def test_scales_that_are_no_numbers_are_refused_when_read(tmp_path: Path) -> None:
    raw = torch.zeros(2, 18, dtype=torch.uint8)
    raw[1, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # float16 NaN
    write(tmp_path / "m.gguf", {"a.weight": ("Q4_0", (2, 32), raw)})
    with pw.open(tmp_path / "m.gguf") as checkpoint, pytest.raises(CheckpointError, match=r"a\.weight.*NaN or inf"):
        _ = checkpoint["a.weight"]
    raw = torch.zeros(1, 66, dtype=torch.uint8)
    raw[0, 0] = 3  # the code of no ternary number
    write(tmp_path / "t.gguf", {"a.weight": ("TQ2_0", (1, 256), raw)})
    with pytest.raises(CheckpointError, match=r"t\.gguf: a\.weight: TQ2_0"):
        pw.load(tmp_path / "t.gguf")


# -- several files ----------------------------------------------------------------------------------------------


def part(no: int, count: int, total: int | None = None) -> dict[str, Value]:
    out = {"split__no": Value("uint16", no), "split__count": Value("uint16", count)}
    return out | ({} if total is None else {"split__tensors__count": Value("int32", total)})


def one(value: float) -> tuple[str, tuple[int, ...], Tensor]:
    return "F32", (2, 4), torch.full((2, 4), float(value)).view(torch.uint8).reshape(2, 16)


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    write(tmp_path / "m-00001-of-00002.gguf", {"a": one(1)}, **part(0, 2, 2))
    write(tmp_path / "m-00002-of-00002.gguf", {"b": one(2)}, **part(1, 2))
    for path in (tmp_path, tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"):
        with pw.open(path) as checkpoint:
            assert set(checkpoint) == {"a", "b"}
            assert float(checkpoint["b"].sum()) == 16
            assert len(checkpoint.files) == 2
            assert not any(key.startswith("split.") for key in checkpoint.metadata)


def test_bad_parts_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    write(first, {"a": one(1)}, **part(0, 2, 2))
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf"):
        pw.open(first)
    for tensors, kv, reason in (
        ({"b": one(1)}, part(0, 2), "is not declared as part 1"),
        ({"a": one(1)}, part(1, 2), "is also in another part of the model"),
        ({"b": one(1), "c": one(1)}, part(1, 2), "declares 2 tensors in all parts, found 3"),
        (
            {"b": one(1)},
            {"split__no": Value("string", "1"), "split__count": Value("uint16", 2)},
            "must be an integer",
        ),
    ):
        second.unlink(missing_ok=True)
        write(second, tensors, **kv)
        with pytest.raises(CheckpointError, match=reason):
            pw.open(first)
    other = tmp_path / "name.gguf"
    write(other, {"a": one(1)}, **part(0, 2))
    with pytest.raises(CheckpointError, match="its name must end in -00001-of-00002"):
        pw.open(other)
    write(tmp_path / "many.gguf", {"a": one(1)}, **part(7, 2))
    with pytest.raises(CheckpointError, match="is part 7 of 2"):
        pw.open(tmp_path / "many.gguf")


def test_a_folder_with_two_models_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, {"a": one(1)})
    with pytest.raises(CheckpointError, match=r"contains 2 GGUF models \(a.gguf, b.gguf\)"):
        pw.open(tmp_path)
    (tmp_path / "b.gguf").unlink()
    assert set(pw.load(tmp_path)) == {"a"}


# -- into models ----------------------------------------------------------------------------------------------


def saved(model: nn.Module, folder: Path) -> Path:
    pw.save(model, folder)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    return folder


def plain(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, QT) else x


def outputs(model: nn.Module) -> Tensor:
    ids = torch.arange(24).reshape(2, 12) % 40 + 3
    with torch.no_grad():
        return model(ids)[0]


@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("llama_biased", "phi3_long")])
def test_a_model_goes_to_gguf_and_back(name: str, tmp_path: Path) -> None:
    """Floats: the same outputs through load and through convert, whatever the transforms of the architecture."""
    model = random(name)
    report = pw.convert(saved(model, tmp_path / "own"), tmp_path / "m.gguf", to="gguf")
    assert "there is no tokenizer.json" in report.config
    fresh = type(model)(model.config).eval()
    pw.load(tmp_path / "m.gguf", fresh, strict=name != "bert")  # GGUF has no pooler
    assert torch.equal(outputs(fresh), outputs(model))
    pw.convert(tmp_path / "m.gguf", tmp_path / "back")
    again = type(model)(model.config).eval()
    pw.load(tmp_path / "back", again, strict=name != "bert")
    assert torch.equal(outputs(again), outputs(model))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == model.config.model_type
    assert config["hidden_size"] == model.config.hidden_size


def test_quantized_rows_in_another_order_stay_what_they_are(tmp_path: Path) -> None:
    """q and k of Llama: the same codes and scales, and the pieces of a conversion are those of the whole."""
    model = random("llama")
    pw.quantize_(model, pw.SpecConfig(pw.QuantSpec(pw.get_format("int8"), (32,), scale=torch.float16)))
    report = pw.convert(saved(model, tmp_path / "own"), tmp_path / "m.gguf", to="gguf")
    assert {row.note for row in report.quantized} == {"exact"}
    assert {row.scheme for row in report.quantized} == {"Q8_0"}
    with pw.open(tmp_path / "m.gguf") as raw:
        named = under_hf_names(raw)
        for name, held in named.held.items():
            whole = held.read()
            if held.rows is not None:
                pieces = [held.rows(i, min(i + 3, whole.shape[0])) for i in range(0, whole.shape[0], 3)]
                assert torch.equal(torch.cat([plain(p) for p in pieces]), plain(whole)), name
        q = "model.layers.0.self_attn.q_proj.weight"
        assert torch.equal(named[q].dequantize(), model.get_parameter(q).dequantize())
        assert not torch.equal(raw["blk.0.attn_q.weight"].dequantize(), model.get_parameter(q).dequantize())
    fresh = type(model)(model.config).eval()
    pw.load(tmp_path / "m.gguf", fresh)
    assert torch.equal(outputs(fresh), outputs(model))
    half = type(model)(model.config).to(torch.bfloat16).eval()
    pw.load(tmp_path / "m.gguf", half)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}, "a model has one dtype, its GGUF file several"


def test_an_unknown_architecture_needs_a_pattern_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    kv: dict[str, Any] = {"general__architecture": Value("string", "quark")}
    write(path, {"blk.0.up.weight": one(1), "blk.1.up.weight": one(2)}, **kv)
    model = nn.ModuleList(nn.Linear(4, 2, bias=False) for _ in range(2))
    with pytest.raises(CheckpointError, match="quark"):
        pw.load(path, model)
    (tmp_path / "names.toml").write_text('[tensors]\n"blk.{i}.up.weight" = "{i}.weight"\n')
    pw.load(path, model, names=tmp_path / "names.toml")
    assert [float(p.detach().sum()) for p in model.parameters()] == [8, 16]
    pw.convert(path, tmp_path / "own", names=tmp_path / "names.toml")
    assert set(pw.load(tmp_path / "own")) == {"0.weight", "1.weight"}
    assert not (tmp_path / "own" / "config.json").exists()
    assert set(pw.load(path)) == {"blk.0.up.weight", "blk.1.up.weight"}, "without a model: the file's own names"


def test_a_format_of_another_library_is_told_where_there_is_no_config(tmp_path: Path) -> None:
    kv: dict[str, Any] = {"general__architecture": Value("string", "quark")}
    write(tmp_path / "m.gguf", {"blk.0.up.weight": ("Q8_0", (32, 64), finite_raw("Q8_0", (32, 64)))}, **kv)
    (tmp_path / "names.toml").write_text('[tensors]\n"blk.{i}.up.weight" = "{i}.weight"\n')
    pw.convert(tmp_path / "m.gguf", tmp_path / "there", to="compressed-tensors", names=tmp_path / "names.toml")
    with pw.open(tmp_path / "there") as checkpoint:
        assert checkpoint.quantized.keys() == {"0.weight"}


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_inspect_says_what_is_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", {"a.weight": ("Q4_K", (2, 256), finite_raw("Q4_K", (2, 256))), "b": one(1)})
    output = run("inspect", tmp_path / "m.gguf", "--all").stdout
    assert "m.gguf: gguf" in output
    line = next(line for line in output.splitlines() if line.startswith("a.weight"))
    assert "Q4_K: uint4[32] scale=(uint6[8] scale=f16)" in line
    data = json.loads(run("inspect", tmp_path / "m.gguf", "--json").stdout)
    assert (data["format"], data["format_version"]) == ("gguf", None)
    assert {t["name"]: t["bytes"] for t in data["tensors"]} == {"a.weight": 288, "b": 32}
    assert [t["word"] for t in data["tensors"]] == ["Q4_K", "F32"]
    assert "RUNS" in run("explain", tmp_path / "m.gguf", "a.weight").stdout
