"""Which tensors of a checkpoint are layers: by config.json with transformers, by names without."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import load, quantize_checkpoint
from pennyweight.io.checkpoint import open_checkpoint
from pennyweight.io.meta_model import from_names, model_class, outline
from pennyweight.io.safetensors_file import Entry
from pennyweight.planning.configs import Int8WeightOnlyConfig
from pennyweight.quantize import quantize_
from tests.io.test_native_format import assert_same

KINDS = {
    "model.embed_tokens.weight": ((50, 8), nn.Embedding),
    "transformer.wte.weight": ((50, 8), nn.Embedding),
    "bert.embeddings.position_embeddings.weight": ((50, 8), nn.Embedding),
    "model.layers.0.self_attn.q_proj.weight": ((8, 8), nn.Linear),
    "model.layers.0.mlp.gate_proj.weight": ((20, 8), nn.Linear),
    "lm_head.weight": ((50, 8), nn.Linear),
    "model.layers.0.input_layernorm.weight": ((8,), nn.Module),
    "h.0.ln_1.weight": ((8, 1), nn.Module),
    "conv1.weight": ((4, 3, 5), nn.Conv1d),
    "visual.patch.weight": ((4, 3, 5, 5), nn.Conv2d),
    "mlp.experts.weight": ((4, 8, 8), nn.Module),
    "mlp.experts.gate_up_proj": ((4, 8, 8), nn.Module),
    "weight": ((3, 3), nn.Linear),  # of the root
}


def test_kinds_by_name() -> None:
    model = from_names({name: Entry(torch.float16, shape) for name, (shape, _) in KINDS.items()})
    for name, (shape, kind) in KINDS.items():
        module = model.get_submodule(name.rpartition(".")[0])
        assert type(module) is kind, name
        parameter = module.get_parameter(name.rpartition(".")[2])
        assert (tuple(parameter.shape), parameter.dtype, parameter.is_meta) == (shape, torch.float16, True)
    assert {n for n, _ in model.named_parameters()} == set(KINDS)
    assert "Linear" in repr(model)


def test_float8_and_whole_numbers_are_no_layers() -> None:
    entries = {"a.weight": Entry(torch.float8_e4m3fn, (8, 8)), "b.weight": Entry(torch.int32, (8, 8))}
    model = from_names(entries)
    assert not any(isinstance(m, nn.Linear) for m in model.modules())


# -- with transformers -------------------------------------------------------------------------------------------------


def llama(tied: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), gpt2], ids=["llama", "tied llama", "gpt2"])
def test_architecture_from_config(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "src")
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "dst", Int8WeightOnlyConfig())
    assert f"layers from config.json: {type(model).__name__}" in report.config
    fresh = copy.deepcopy(model)
    expected = quantize_(model, Int8WeightOnlyConfig())
    theirs = {r.name: r for r in expected.rows}
    for row in report.rows:
        assert (row.type, row.scheme) == (theirs[row.name].type, theirs[row.name].scheme), row.name
        assert row.sqnr == pytest.approx(theirs[row.name].sqnr)
    load(tmp_path / "dst", fresh)
    for name, tensor in model.state_dict().items():
        assert_same(tensor, fresh.state_dict()[name])
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(fresh(ids).logits, model(ids).logits)
    assert any(isinstance(p, QT) for p in fresh.parameters())
    saved = json.loads((tmp_path / "dst" / "config.json").read_text())
    assert saved["quantization_config"]["quant_method"] == "pennyweight"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "of my own", "auto_map": {"AutoModel": "evil.Model"}}, "no model of type 'of my own'"),
        ({"architectures": ["os.system"]}, "no os.system for llama"),
        ({"architectures": None}, "no model of type"),
        ({"hidden_size": 64}, "is not a tensor of LlamaForCausalLM"),
        ({"hidden_size": "many"}, "cannot build it"),
        ({"num_attention_heads": 0}, "cannot build it"),
    ],
)
def test_a_config_that_does_not_help(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Nothing in it is imported or run; the layers are guessed from the names, and the report says why."""
    llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with open_checkpoint(tmp_path) as checkpoint:
        model, how = outline(checkpoint)
    assert why in how
    assert how.startswith("layers guessed from names")
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == 15


def test_finding_a_class_imports_no_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mappings load every config of transformers when they are asked for keys, or whether they are empty."""
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")

    def refuse(self: Any) -> Any:
        raise AssertionError("this imports all configs")

    monkeypatch.setattr(type(auto.AutoModel._model_mapping), "keys", refuse)
    found = model_class({"model_type": "codegen", "architectures": ["CodeGenForCausalLM"]})
    assert getattr(found, "__name__", found) == "CodeGenForCausalLM"
