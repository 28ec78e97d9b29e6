"""docs/features.md and docs/configs.md: the Python runs as it stands there, and the tables are complete."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import pennyweight as pw
import pennyweight_torchao
from pennyweight.planning.configs.by_name import CONFIGS

DOCS = Path(__file__).parents[2] / "docs"
FEATURES, CONFIG_PAGE = ((DOCS / name).read_text(encoding="utf-8") for name in ("features.md", "configs.md"))
SEARCH, TORCHAO, FILES = re.findall(r"```python\n(.*?)```", FEATURES, re.S)
(PATTERNS,) = re.findall(r"```python\n(.*?)```", CONFIG_PAGE, re.S)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 96, 64))
        self.down = nn.Parameter(torch.randn(4, 64, 48))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(64, 64)
        self.experts = Experts()


class Model(nn.Module):
    """A model with the names that the page's patterns have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(64, 100)


def test_search(capsys):
    torch.manual_seed(0)
    names: dict = {"pw": pw, "torch": torch}
    exec(SEARCH, names)
    assert "error/nearest" in capsys.readouterr().out
    held = [names["model"][i].weight.to_layout("bits") for i in (0, 2)]
    assert 8 * sum(w.nbytes for w in held) <= 3.5 * sum(w.numel() for w in held)


def test_patterns():
    model = Model()
    exec(PATTERNS, {"pw": pw, "model": model})
    schemes = {name: getattr(p, "spec", None) for name, p in model.named_parameters()}
    assert schemes["lm_head.weight"] is None
    assert schemes["embed_tokens.weight"].format.name == "int8"
    assert schemes["layers.1.experts.gate_up"].format.name == "uint4"
    assert schemes["layers.1.experts.down"] is None
    assert model.layers[0].attention.weight.act is not None


def test_short_names():
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (.+?) \|$", CONFIG_PAGE, re.M)
    wanted = {name: (e.text, "yes" if e.group else f"fixed: {e.no_group}") for name, e in CONFIGS.items()}
    assert {name: (text, group) for name, text, group in rows} == wanted


def test_files(tmp_path, monkeypatch, capsys):
    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM(config)
    pw.quantize_(model, pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)))
    pw.save(model.half(), tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config.to_dict()))
    pw.convert(tmp_path / "own", tmp_path / "model.gguf", to="gguf")
    pw.convert(tmp_path / "own", tmp_path / "GPTQ_DIR", to="gptq")
    monkeypatch.chdir(tmp_path)
    fresh = LlamaForCausalLM(config)
    exec(FILES, {"pw": pw, "model": fresh})
    name = "model.layers.0.mlp.up_proj.weight"
    assert isinstance(fresh.get_parameter(name), pw.AffineQuantizedTensor)
    assert "blk.0.ffn_up.weight" in capsys.readouterr().out
    with pw.open("for_vllm") as checkpoint:
        assert checkpoint.format == "compressed-tensors"


@pytest.mark.filterwarnings("ignore:.*already imported")
def test_torchao():
    model = nn.Sequential(nn.Linear(64, 64))
    try:
        exec(TORCHAO, {"model": model})
    finally:
        pennyweight_torchao.uninstall()
    assert isinstance(model[0].weight, pw.AffineQuantizedTensor)
