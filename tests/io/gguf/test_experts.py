"""Mixtures of experts: both forms of Hugging Face, files of GGUF, and llama.cpp, which computes the same logits."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as T
from torch import nn

import pennyweight as pw
from pennyweight.io import CheckpointError
from pennyweight.io import open as open_checkpoint
from pennyweight.io.gguf.experts import in_memory, names_in_memory, stacked
from pennyweight.io.gguf.imatrix import collect_imatrix, write_imatrix
from tests.io.gguf.test_export import saved

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
QWEN = {"num_experts": 4, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "mixtral": (T.MixtralForCausalLM, T.MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen2_moe": (T.Qwen2MoeForCausalLM, T.Qwen2MoeConfig(**SIZES, **QWEN, shared_expert_intermediate_size=256)),
    "qwen3_moe": (T.Qwen3MoeForCausalLM, T.Qwen3MoeConfig(**SIZES, **QWEN, head_dim=64, norm_topk_prob=True)),
}


def model_of(name: str, seed: int = 0) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if key.endswith("mlp.gate.weight") or "norm" in key:
                p.copy_(torch.randn(p.shape) * 0.3 + ("norm" in key))
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(30).reshape(2, 15)).logits


@pytest.mark.parametrize("name", MODELS)
def test_both_forms_become_the_same_file(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "single")  # a matrix for each expert
    source = saved(model, tmp_path / "stacked")
    written = []
    for folder in (tmp_path / "single", source):
        pw.convert(folder, tmp_path / "m.gguf", to="gguf", gguf_type="Q8_0", resume=False)
        reader = gguf.GGUFReader(tmp_path / "m.gguf")
        written.append({t.name: t.data.tobytes() for t in reader.tensors})
        (tmp_path / "m.gguf").unlink()
    assert written[0] == written[1]
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert {t for n, t in types.items() if n.endswith("_exps.weight")} == {"Q8_0"}
    assert {t for n, t in types.items() if "gate_inp" in n} == {"F32"}
    assert tuple(next(t.shape for t in reader.tensors if t.name == "blk.0.ffn_down_exps.weight"))[2] == 4


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    model = model_of(name)
    pw.convert(saved(model, tmp_path / "f"), tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    fresh = model_of(name, 1)
    pw.load(tmp_path / "m.gguf", fresh)
    off = (logits(fresh) - logits(model)).abs().max() / logits(model).abs().max()
    assert off < {"F32": 1e-5, "Q8_0": 0.1, "Q4_K_M": 1}[kind]
    pw.convert(tmp_path / "m.gguf", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == name
    again = T.AutoConfig.for_model(**config)
    for key in ("num_experts_per_tok", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        assert getattr(again, key, None) == getattr(model.config, key, None), key
    pw.convert(tmp_path / "back", tmp_path / "n.gguf", to="gguf")
    first, second = (gguf.GGUFReader(tmp_path / file) for file in ("m.gguf", "n.gguf"))
    assert {t.name: t.data.tobytes() for t in first.tensors} == {t.name: t.data.tobytes() for t in second.tensors}


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is built from source")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-3), ("Q8_0", 0.05), ("Q5_K_M", 0.08)])
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_logits(name: str, kind: str, tolerance: float, tmp_path: Path) -> None:
    from tests.io.gguf.test_llama_cpp import theirs

    source = saved(model_of(name), tmp_path / "f", tokenizer=True)
    pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    model = model_of(name, 1)
    pw.load(tmp_path / "m.gguf", model)
    engine, tokens = theirs(tmp_path / "m.gguf"), [0, *range(5, 30)]
    engine.eval(tokens)
    with torch.no_grad():
        mine = model(torch.tensor([tokens])).logits[0]
    other = torch.from_numpy(np.array(engine.scores[: len(tokens)]))
    off = (mine - other).abs().amax(1) / mine.abs().amax(1)
    # rounding may send a token to another expert; F32 shows that all else is the same
    assert (off < tolerance).sum() >= len(tokens) - (0 if kind == "F32" else 3), off


@pytest.mark.parametrize("name", MODELS)
def test_importance_by_expert(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    seen: list[torch.Tensor] = []
    experts = model.model.layers[1].mlp.experts
    hook = experts.register_forward_pre_hook(lambda m, args: seen.extend(args[:2]))
    found = collect_imatrix(model, [torch.arange(60).reshape(4, 15)])
    hook.remove()
    x, chosen = seen
    m = found.moments["blk.1.ffn_up_exps.weight"]
    for e in range(4):
        routed = x[(chosen == e).any(-1)]
        torch.testing.assert_close(m.sums[e], routed.square().sum(0))
        assert int(m.counts[e]) == len(routed)
    assert found.moments["blk.1.ffn_gate_exps.weight"] is not None
    assert found.moments["blk.0.ffn_down_exps.weight"].sums.shape[0] == 4
    write_imatrix(found, tmp_path / "i.gguf")
    source = saved(model, tmp_path / "f")
    pw.convert(source, tmp_path / "m.gguf", to="gguf", gguf_type="Q2_K_S", imatrix=tmp_path / "i.gguf")
    pw.load(tmp_path / "m.gguf", model_of(name, 1))


def test_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = model_of("mixtral")
    model.save_pretrained(tmp_path / "f")
    with open_checkpoint(tmp_path / "f") as source:
        held = dict(source.held)
        name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
        shape = held[name.format(2)].kind.shape
        assert stacked(held)["model.layers.1.mlp.experts.down_proj.weight"].kind.shape == (4, *shape)
        other = replace(held[name.format(2)], kind=replace(held[name.format(2)].kind, shape=(shape[0], shape[1] - 1)))
        with pytest.raises(CheckpointError, match=r"experts\.2\.w2\.weight: is float32 \[256, 511\], but expert 0 is"):
            stacked(held | {name.format(2): other})
        del held[name.format(1)]
        with pytest.raises(CheckpointError, match="expert 1 is missing"):
            stacked(held)
    pw.convert(saved(model, tmp_path / "g"), tmp_path / "m.gguf", to="gguf", gguf_type="Q8_0")
    with open_checkpoint(tmp_path / "m.gguf") as source:
        from pennyweight.io.gguf.reader import under_hf_names

        held = dict(stacked(under_hf_names(source).held))
        assert in_memory(held).keys() == model.state_dict().keys()
        del held["model.layers.0.mlp.experts.up_proj.weight"]
        with pytest.raises(CheckpointError, match=r"gate_proj\.weight: is .*, but up_proj is missing"):
            in_memory(held)
    assert names_in_memory("a.experts.down_proj") == ("a.experts.down_proj.weight",)
    assert names_in_memory("a.mlp.down_proj.weight") == ("a.mlp.down_proj.weight",)


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    model = model_of("qwen3_moe")
    source = saved(model, tmp_path / "f")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"norm_topk_prob": False}))
    with pytest.raises(CheckpointError, match=r"norm_topk_prob is False, but llama\.cpp computes 'qwen3moe' with True"):
        pw.convert(source, tmp_path / "m.gguf", to="gguf")
    (source / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0]}))
    with pytest.raises(CheckpointError, match="mlp_only_layers"):
        pw.convert(source, tmp_path / "m.gguf", to="gguf")
