"""Writing GGUF: which type a tensor gets, what is exact, bytes that come back, and jobs that were stopped."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8, NF4, UINT4
from pennyweight.core.spec import FP8_ROW, INT8_ROW, MXFP4, NVFP4, SPECS, TERNARY_256, TINYGEMM, ActivationSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.export import FILE_TYPES
from pennyweight.io.gguf.quantize import FROM_FLOATS, RULES
from tests.io.crashing import Crash, full_after, stopping

CONFIG = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=300, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
F16 = torch.float16


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG).eval()


def saved(model: nn.Module, folder: Path, *, tokenizer: bool = False) -> Path:
    pw.save(model, folder)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    if tokenizer:
        tokens = Tokenizer(models.BPE())
        tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
        tokens.train_from_iterator(["the weights of a model are small"] * 4, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="<s>", eos_token="</s>")
        fast.save_pretrained(folder)
    return folder


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(30).reshape(2, 15)).logits


@pytest.mark.parametrize("kind", ["F16", "BF16", *RULES])
def test_floats_to_each_type(kind: str, tmp_path: Path) -> None:
    """The file is what gguf's reader sees, and the model is what transformers makes of it."""
    report = pw.convert(
        saved(llama(), tmp_path / "f"), tmp_path / "m.gguf", to="gguf", gguf_type=f"{kind.lower()}-pure"
    )
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert {t for name, t in types.items() if "norm" not in name} == {kind}
    assert {t for name, t in types.items() if "norm" in name} == {"F32"}
    assert reader.fields["general.file_type"].contents() == FILE_TYPES[kind]
    fresh = LlamaForCausalLM(CONFIG).eval()
    pw.load(tmp_path / "m.gguf", fresh)
    if kind != "NVFP4":  # which transformers does not read
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
        torch.testing.assert_close(logits(fresh), logits(theirs), rtol=1e-4, atol=1e-4)
    quantized = [row for row in report.rows if row.scheme]
    assert len(quantized) == (0 if TYPES[kind].plain else 16)
    for row in quantized:
        was, now = llama().get_parameter(row.name), fresh.get_parameter(row.name)
        assert row.sqnr == pytest.approx(now.error(was), abs=0.01)
        assert row.scheme == kind


@pytest.mark.parametrize("kind", [k for k, t in TYPES.items() if t.pack is not None])
def test_a_file_comes_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    pw.convert(saved(llama(), tmp_path / "f"), tmp_path / "a.gguf", to="gguf", gguf_type=f"{kind}-pure")
    pw.convert(tmp_path / "a.gguf", tmp_path / "own")
    other = kind == "TQ1_0"  # two types have these numbers
    report = pw.convert(tmp_path / "own", tmp_path / "b.gguf", to="gguf", gguf_type=f"{kind}-pure" if other else None)
    assert {row.note for row in report.quantized} == {"exact"}
    a, b = gguf.GGUFReader(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "b.gguf")
    first, second = ({t.name: t.data.tobytes() for t in reader.tensors} for reader in (a, b))
    assert first == second


@pytest.mark.parametrize(
    ("spec", "kind", "exact"),
    [
        (pw.QuantSpec(INT4, (32,), scale=F16), "Q4_0", True),
        (pw.QuantSpec(INT8, (32,), scale=F16), "Q8_0", True),
        (pw.QuantSpec(INT8, (-1,)), "Q8_0", False),
        (pw.QuantSpec(INT4, (128,)), "Q4_0", False),
        (pw.QuantSpec(UINT4, (32,), scale=F16, offset=F16), "Q4_1", True),
        (TINYGEMM, "Q4_1", False),
        (pw.QuantSpec(UINT4, (64,), scale=F16, zero_point=True), "Q4_1", False),
        (pw.QuantSpec(NF4, (64,)), "Q8_0", False),
        (FP8_ROW, "Q8_0", False),
        (MXFP4, "MXFP4", True),
        (SPECS["q4_k"], "Q4_K", True),
        (SPECS["q6_k"], "Q6_K", True),
        (SPECS["iq4_nl"], "IQ4_NL", True),
        (TERNARY_256, "TQ2_0", True),
        (NVFP4, "Q8_0", False),
    ],
    ids=str,
)
def test_the_type_that_has_the_numbers(spec: pw.QuantSpec, kind: str, exact: bool, tmp_path: Path) -> None:
    model = llama()
    pw.quantize_(model, pw.SpecConfig(spec))
    report = pw.convert(saved(model, tmp_path / "f"), tmp_path / "m.gguf", to="gguf")
    assert {row.scheme for row in report.quantized} == {kind}
    assert {row.note == "exact" for row in report.quantized} == {exact}
    after = pw.load(tmp_path / "m.gguf", LlamaForCausalLM(CONFIG)).state_dict()
    for row in report.quantized:
        was, now = model.get_parameter(row.name).dequantize(torch.float32), after[row.name]
        assert row.sqnr == pytest.approx(now.error(was), abs=0.01) or min(row.sqnr, now.error(was)) > 100
        assert exact == (row.sqnr == float("inf"))
        if not exact and kind in ("Q4_0", "Q4_1") and spec is not TINYGEMM:
            assert row.sqnr > 60, "codes stay, scales are rounded"


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    config = LlamaConfig(**CONFIG.to_dict() | {"hidden_size": 96, "head_dim": 24, "intermediate_size": 512})
    model = LlamaForCausalLM(config)
    report = pw.convert(saved(model, tmp_path / "f"), tmp_path / "m.gguf", to="gguf", gguf_type="q4_k")
    rows = {row.name: row for row in report.rows}
    up, down = (rows[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("up", "down"))
    assert (up.scheme, down.scheme) == ("Q8_0", "Q4_K")
    assert "rows of 96 are not whole blocks of Q4_K" in up.note


def test_stopped_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "f", tokenizer=True)
    pw.convert(source, tmp_path / "whole.gguf", to="gguf", gguf_type="Q8_0")
    seen: list[str] = []

    def stop(done: int, total: int, name: str) -> None:
        assert total == 21
        seen.append(name)
        if len(seen) == 7:
            raise KeyboardInterrupt

    job: dict[str, Any] = {"to": "gguf", "gguf_type": "Q8_0"}
    with pytest.raises(KeyboardInterrupt):
        pw.convert(source, tmp_path / "m.gguf", progress=stop, **job)
    assert not (tmp_path / "m.gguf").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"f", "whole.gguf", "m.gguf.partial", "m.gguf.progress.json"}
    with pytest.raises(CheckpointError, match="has another source, config, release"):
        pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type="Q4_0")
    report = pw.convert(source, tmp_path / "m.gguf", **job)
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert all(row.sqnr is not None for row in report.quantized), "of what was done before the stop, too"
    assert {p.name for p in tmp_path.iterdir()} == {"f", "whole.gguf", "m.gguf"}


@pytest.mark.parametrize("how", ["before", "after", "error"])
def test_stopped_at_any_step_the_old_file_stays_or_the_new_one_is_there(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda fd: None)
    source, path = saved(llama(), tmp_path / "f"), tmp_path / "m.gguf"
    pw.convert(source, path, to="gguf", gguf_type="Q4_0")
    old = path.read_bytes()
    with stopping(how) as steps:
        pw.convert(source, path, to="gguf", gguf_type="Q8_0")
    new, count = path.read_bytes(), len(steps)
    ended = 0
    for at in {*range(0, count, 17), *range(count - 8, count)}:
        path.write_bytes(old)
        with pytest.raises(OSError if how == "error" else Crash), stopping(how, at):
            pw.convert(source, path, to="gguf", gguf_type="Q8_0")
        assert path.read_bytes() in (old, new)
        ended += path.read_bytes() == new
        pw.convert(source, path, to="gguf", gguf_type="Q8_0")  # goes on
        assert path.read_bytes() == new
        assert {p.name for p in tmp_path.iterdir()} == {"f", "m.gguf"}
    assert 0 < ended < 8
    for room in (0, 1000, len(new) // 2, len(new) - 1):
        path.write_bytes(old)
        with pytest.raises(OSError, match="No space left"), full_after(room):
            pw.convert(source, path, to="gguf", gguf_type="Q8_0", resume=False)
        assert path.read_bytes() == old
    pw.convert(source, path, to="gguf", gguf_type="Q8_0")
    assert path.read_bytes() == new


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    source, path = saved(llama(), tmp_path / "f"), tmp_path / "m.gguf"
    pw.convert(source, tmp_path / "whole.gguf", to="gguf", gguf_type="Q8_0")
    refused = []

    def told(done: int, total: int, name: str) -> None:
        for resume in (True, False) if done == 3 else ():
            with pytest.raises(CheckpointError, match="another process is writing it") as caught:
                pw.convert(source, path, to="gguf", gguf_type="Q8_0", resume=resume)
            refused.append(caught.value)

    pw.convert(source, path, to="gguf", gguf_type="Q8_0", progress=told)
    assert len(refused) == 2
    assert path.read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"f", "m.gguf", "whole.gguf"}


def test_tokenizer_and_config_come_back(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "f", tokenizer=True)
    report = pw.convert(source, tmp_path / "m.gguf", to="gguf")
    assert "tokenizer" not in report.config
    pw.convert(tmp_path / "m.gguf", tmp_path / "back")
    before, after = (PreTrainedTokenizerFast.from_pretrained(tmp_path / n) for n in ("f", "back"))
    text = "the small weights; ünïcode"
    assert before(text).input_ids == after(text).input_ids
    again = pw.convert(tmp_path / "m.gguf", tmp_path / "q.gguf", to="gguf", gguf_type="Q4_0-pure")
    assert {row.scheme for row in again.quantized} == {"Q4_0"}
    first, second = (gguf.GGUFReader(tmp_path / n) for n in ("m.gguf", "q.gguf"))
    keys = [k for k in first.fields if k.startswith(("tokenizer", "llama"))]
    assert keys
    assert all(first.fields[k].contents() == second.fields[k].contents() for k in keys)


def test_a_model_without_a_tokenizer_says_none(tmp_path: Path) -> None:
    """What llama.cpp reads as a model of token ids; without the key it refuses the file."""
    report = pw.convert(saved(llama(), tmp_path / "f"), tmp_path / "m.gguf", to="gguf")
    assert "token ids only" in " ".join([report.config, *report.notes])
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "none"
    assert fields["llama.vocab_size"].contents() == CONFIG.vocab_size
    pw.convert(tmp_path / "m.gguf", tmp_path / "back")
    assert not (tmp_path / "back" / "tokenizer.json").exists()


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "f")
    for kind in ("IQ2_XS", "I8", "i32", "Q9", ""):  # whole numbers would round the weights
        with pytest.raises(
            ValueError, match=f"gguf_type='{kind}' cannot be written.*; writable types: F32, F16, .*Q4_K"
        ):
            pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    assert all(TYPES[kind].writable for kind in FROM_FLOATS)
    with pytest.raises(CheckpointError, match=r"is a folder; pass the path of a \.gguf file"):
        pw.convert(source, tmp_path, to="gguf")
    pw.convert(source, tmp_path / "m.gguf", to="gguf")
    with pytest.raises(CheckpointError, match="is the source; choose another file"):
        pw.convert(tmp_path / "m.gguf", tmp_path / "m.gguf", to="gguf", gguf_type="Q8_0")
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        pw.convert(source, tmp_path / "n.gguf", to="gguf")
    (source / "config.json").write_text(json.dumps({"model_type": "quark"}))
    with pytest.raises(CheckpointError, match="quark"):
        pw.convert(source, tmp_path / "n.gguf", to="gguf")
    assert {p.name for p in tmp_path.iterdir()} == {"f", "m.gguf"}


@pytest.mark.parametrize("as_float", [False, True])
def test_a_transposed_weight_is_refused(as_float: bool, tmp_path: Path) -> None:
    state = llama().state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    names = tmp_path / "names.toml"  # under this name a matrix is written in float32
    names.write_text('[tensors]\n"blk.{i}.ffn_gate_inp.weight" = "model.layers.{i}.mlp.up_proj.weight"\n')
    state[name] = QT.from_float(torch.randn(256, 512), SPECS["q8_0"]).t()
    pw.save(state, tmp_path / "f")
    (tmp_path / "f" / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight.*stored transposed"):
        pw.convert(tmp_path / "f", tmp_path / "m.gguf", to="gguf", names=names if as_float else None)


def test_what_a_type_does_not_say_is_told(tmp_path: Path) -> None:
    model = llama().double()
    act = ActivationSpec(INT8_ROW)
    pw.quantize_(model, pw.SpecConfig(SPECS["q8_0"], act=act), filter_fn=lambda m, n: n.endswith("up_proj"))
    report = pw.convert(saved(model, tmp_path / "f"), tmp_path / "m.gguf", to="gguf")
    notes = {row.name.split(".", 3)[-1]: row.note for row in report.rows}
    assert notes["mlp.up_proj.weight"] == "exact; its activation quantization is not stored in GGUF"
    assert notes["mlp.down_proj.weight"] == "float64, as F32"
    report = pw.convert(saved(llama(), tmp_path / "g"), tmp_path / "n.gguf", to="gguf", gguf_type="BF16")
    assert "float32, as BF16" in {row.note for row in report.rows}


def test_the_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pennyweight.cli.app import app

    def run(*arguments: Any) -> Any:
        return CliRunner().invoke(app, ["convert", *map(str, arguments)], catch_exceptions=False)

    source = saved(llama(), tmp_path / "f", tokenizer=True)
    plan = run(source, tmp_path / "m.gguf", "--to", "gguf", "--type", "q8_0", "--dry-run")
    assert "a dry run, nothing written" in plan.stdout
    assert not (tmp_path / "m.gguf").exists()
    done = run(source, tmp_path / "m.gguf", "--to", "gguf", "--type", "q8_0", "--json", tmp_path / "r.json")
    assert done.exit_code == 0
    size = (tmp_path / "m.gguf").stat().st_size
    assert f"{size:,} bytes" in done.stdout
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["files"]["after"] == size
    assert {row["scheme"] for row in data["rows"]} == {"", "Q8_0"}
    assert "already exists" in run(source, tmp_path / "m.gguf", "--to", "gguf").stderr
    assert run(source, tmp_path / "m.gguf", "--to", "gguf", "--force").exit_code == 0
    assert "--to is required: one of pennyweight, float, gguf" in run(source, tmp_path / "x").stderr
    assert "--type 'q3' cannot" in run(source, tmp_path / "x.gguf", "--to", "gguf", "--type", "q3").stderr.replace(
        "=", " "
    )
    back = run(tmp_path / "m.gguf", tmp_path / "back", "--to", "float", "--dtype", "bfloat16")
    assert back.exit_code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
