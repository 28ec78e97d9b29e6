"""inspect in groups: equal layers share a line, kinds of layers have totals; every tensor is counted once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.cli.inspect import contents
from pennyweight.cli.inspect_groups import StoredEntry, groups, totals
from pennyweight.planning.layer_kinds import KINDS, kind_of_layer
from pennyweight.planning.quantize_report import size
from tests.io.hub_server import Hub

INT4 = ("--config", "int4", "--group-size", "32")


def entry(name: str, scheme: str = "") -> StoredEntry:
    return StoredEntry(name, (4, 4), "float32", scheme, 64)


def test_layers_that_differ_in_a_number_share_a_line() -> None:
    names = [f"layers.{i}.{n}.weight" for i in range(12) for n in ("q_proj", "up")]
    found = groups([entry("embed.weight"), *(entry(n) for n in names), entry("layers.3.q_proj.bias")])
    assert {label: len(some) for label, some in found} == {
        "embed": 1, "layers.[0-11].q_proj": 12, "layers.[0-11].up": 12, "layers.3.q_proj.bias": 1
    }  # fmt: skip


def test_a_mixture_has_a_line_for_each_scheme() -> None:
    found = groups([entry(f"layers.{i}.up.weight", "int8" if i in (0, 5, 6, 11) else "int4") for i in range(12)])
    assert {label: len(some) for label, some in found} == {
        "layers.[0,5-6,11].up": 4, "layers.[1-4,7-10].up": 8
    }  # fmt: skip


def test_two_numbers() -> None:
    found = groups([entry(f"h.{i}.experts.{j}.w") for i in range(3) for j in range(8)])
    assert [(label, len(some)) for label, some in found] == [("h.[0-2].experts.[0-7].w", 24)]


# Names as these libraries write them; kinds by reading the models
NAMES = {
    "model.embed_tokens.weight": "embeddings", "transformer.wpe.weight": "embeddings", "shared.weight": "embeddings",
    "token_embd.weight": "embeddings", "bert.embeddings.word_embeddings.weight": "embeddings",
    "vit.embeddings.cls_token": "embeddings", "tok_embeddings.weight": "embeddings",
    "model.layers.3.self_attn.q_proj.weight": "attention", "h.0.attn.c_proj.bias": "attention",
    "bert.encoder.layer.0.attention.output.dense.weight": "attention", "blk.0.attn_q.weight": "attention",
    "encoder.block.0.layer.0.SelfAttention.o.weight": "attention", "layers.0.attention.wq.weight": "attention",
    "transformer_blocks.0.attn1.to_q.weight": "attention", "layer.1.attention.self.query.weight": "attention",
    "model.layers.3.mlp.down_proj.weight": "MLP", "bert.encoder.layer.0.output.dense.weight": "MLP",
    "encoder.block.0.layer.1.DenseReluDense.wo.weight": "MLP", "blk.0.ffn_gate.weight": "MLP",
    "model.layers.0.mlp.experts.gate_up_proj": "MLP", "layers.0.feed_forward.w1.weight": "MLP",
    "transformer.layer.0.ffn.lin1.weight": "MLP", "model.decoder.layers.0.fc2.bias": "MLP",
    "model.norm.weight": "norms", "h.0.ln_1.bias": "norms", "transformer.ln_f.weight": "norms",
    "bert.encoder.layer.0.attention.output.LayerNorm.weight": "norms", "blk.0.attn_norm.weight": "norms",
    "output_norm.weight": "norms", "bert.embeddings.LayerNorm.bias": "norms", "layer1.0.bn2.running_var": "norms",
    "lm_head.weight": "head", "output.weight": "head", "classifier.1.weight": "head", "score.weight": "head",
    "cls.predictions.decoder.weight": "head", "fc.weight": "head", "pooler.dense.weight": "head",
    "layer1.0.conv1.weight": "convolutions", "model.encoder.conv1.weight": "convolutions",
    "backbone.layers.0.mixer.in_proj.weight": "other", "logit_scale": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_kind(name: str) -> None:
    assert kind_of_layer(name) == NAMES[name]


def test_totals_count_everything_once(writer: Path) -> None:
    tensors = contents(str(writer)).tensors
    found = totals(tensors)
    assert list(found) == [k for k in KINDS if k in found] == ["embeddings", "attention", "MLP", "head", "norms"]
    assert sum(row["tensors"] for row in found.values()) == len(tensors)
    assert sum(row["parameters"] for row in found.values()) == sum(t.numel for t in tensors)
    assert sum(row["bytes"] for row in found.values()) == sum(t.bytes for t in tensors)


def lines(output: str) -> dict[str, list[str]]:
    """First word of each line -> its cells."""
    return {cells[0]: cells for line in output.splitlines() if len(cells := re.split(r" {2,}", line.strip())) > 1}


def test_every_format_and_hub_ids(hub: Hub, writer: Path, tmp_path: Path, run: Any) -> None:
    """Native, float, compressed-tensors, GPTQ, AWQ, GGUF, and an id: the same seven lines of layers."""
    assert run("quantize", writer, tmp_path / "native", *INT4).exit_code == 0
    assert run("quantize", writer, tmp_path / "w4", "--config", "w4a16", "--group-size", "32").exit_code == 0
    assert run("quantize", writer, tmp_path / "u4", "--config", "uint4", "--group-size", "32").exit_code == 0
    paths = {"native": tmp_path / "native", "float": writer, "hub": "org/writer"}
    for source, to in (("w4", "compressed-tensors"), ("w4", "gptq"), ("u4", "awq")):
        more = () if to != "awq" else ("--requantize",)
        result = run("convert", tmp_path / source, tmp_path / to, "--to", to, *more)
        assert result.exit_code == 0, result.stderr
        paths[to] = tmp_path / to
    hub.add("org/writer", {p.name: p.read_bytes() for p in writer.iterdir()})
    for name, path in paths.items():
        output = run("inspect", path).stdout
        cells = lines(output)
        layer = cells["model.layers.[0-1].mlp.down_proj"]
        assert layer[1:3] == ["2", "64×96"], name
        expected = "float32" if name in ("float", "hub") else "int4, groups of 32"
        assert layer[3].removeprefix("u").startswith(expected), name
        total = sum(t.bytes for t in contents(str(path if name != "hub" else writer)).tensors if "down_proj" in t.name)
        assert layer[4] == size(total)
        assert {"embeddings", "attention", "MLP", "norms", "head"} <= cells.keys()
        assert "model.layers.0.mlp.down_proj.weight" not in output
        everything = run("inspect", path, "--all").stdout
        assert everything.index("model.layers.0.mlp.down_proj.weight") < everything.index(
            "model.layers.1.mlp.down_proj"
        )
        data = json.loads(run("inspect", path, "--json").stdout)
        assert data["kinds"]["MLP"]["tensors"] == 6
        assert {t["kind"] for t in data["tensors"]} == data["kinds"].keys()


def test_a_gguf_file(tmp_path: Path, run: Any) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "unknown")
    for i in range(3):
        writer.add_tensor(f"blk.{i}.attn_q.weight", torch.randn(32, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    cells = lines(run("inspect", tmp_path / "m.gguf").stdout)
    assert cells["blk.[0-2].attn_q"][1:3] == ["3", "32×32"]
    assert cells["attention"][1:3] == ["3", "3,072"]


def test_tied_weights_are_named_and_counted_once(tmp_path: Path, run: Any) -> None:
    shared = torch.randn(32, 32)
    pw.save({"embed_tokens.weight": shared, "lm_head.weight": shared}, tmp_path / "tied")
    output = run("inspect", tmp_path / "tied").stdout
    assert "tied: lm_head.weight" in output
    assert json.loads(run("inspect", tmp_path / "tied", "--json").stdout)["kinds"].keys() == {"embeddings"}
