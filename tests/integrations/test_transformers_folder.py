"""load_pretrained: models over folders of ours and plain ones, as pw.load reads them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel, LlamaForCausalLM

import pennyweight as pw
from pennyweight.integrations.transformers import load_pretrained
from tests.integrations.small import IDS, assert_same_weights, float_folder, llama, quantized, tokens


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_class", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_float_folder_is_what_from_pretrained_gives(model_class: type, tied: bool, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied)
    model.generation_config.repetition_penalty = 1.5
    model.save_pretrained(tmp_path)
    ours = load_pretrained(model_class, tmp_path)
    assert type(ours) is LlamaForCausalLM
    assert not ours.training
    assert ours.generation_config.repetition_penalty == 1.5
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied
    assert all(p.requires_grad for p in ours.parameters())
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(ours.model.rotary_emb.inv_freq, expected.model.rotary_emb.inv_freq)
    assert torch.equal(ours(IDS).logits, expected(IDS).logits)
    assert tokens(ours) == tokens(expected)


def test_a_quantized_folder_and_what_can_be_done_with_it(tmp_path: Path) -> None:
    float_folder(tmp_path / "float")
    pw.quantize_checkpoint(tmp_path / "float", tmp_path / "int4", pw.Int4WeightOnlyConfig(32), skip=("lm_head",))
    model = load_pretrained(AutoModelForCausalLM, tmp_path / "int4", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert len(quantized(model)) == 14
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(again, model)
    assert tokens(again) == tokens(model)
    model.dequantize()
    assert quantized(model) == {}


def test_dtype_device_and_names(tmp_path: Path) -> None:
    float_folder(tmp_path, tie_word_embeddings=True)
    assert {p.dtype for p in load_pretrained(AutoModelForCausalLM, tmp_path).parameters()} == {torch.float32}
    half = load_pretrained(AutoModelForCausalLM, tmp_path, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half.lm_head.weight is half.model.embed_tokens.weight
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half(IDS).logits, expected(IDS).logits)
    with pytest.raises(pw.CheckpointError, match=r"the model has .*load with strict=False"):
        load_pretrained(AutoModelForCausalLM, tmp_path, config=llama(num_hidden_layers=3).config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model_type"):
        load_pretrained(AutoModelForCausalLM, tmp_path / "empty")


def test_buffers_that_no_file_holds(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config).eval()
    model.save_pretrained(tmp_path)
    ours = load_pretrained(AutoModel, tmp_path)
    assert torch.equal(ours.embeddings.position_ids, model.embeddings.position_ids)
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(ours(ids).last_hidden_state, model(ids).last_hidden_state)


def test_nothing_stays_patched(tmp_path: Path) -> None:
    float_folder(tmp_path)
    load_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu"
