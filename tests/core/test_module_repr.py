"""print(model) names quantized weights, whatever has happened to the model, and changes nothing in it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import pennyweight as pw

LINE = "(0): Linear(in_features=64, out_features=32, bias=True, weight=int4, groups of 32)"


def quantized() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    pw.quantize_(model, pw.Int4WeightOnlyConfig(32))
    return model


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (pw.Int4WeightOnlyConfig(32), "weight=int4, groups of 32"),
        (pw.Int8WeightOnlyConfig(), "weight=int8 per row"),
        (pw.Int8DynamicActivationInt8WeightConfig(), "weight=int8 per row; inputs int8"),
        (pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.1), "weight=int8 per row; inputs int8 static"),
        (pw.UIntXWeightOnlyConfig("uint3", 32), "weight=int3, groups of 32"),
        (pw.Float8WeightOnlyConfig(), "weight=float8 e4m3 per row"),
        (pw.NF4WeightOnlyConfig(), "weight=nf4, groups of 64"),
        (pw.MXWeightOnlyConfig(), "weight=mxfp8, groups of 32"),
        (pw.NVFP4WeightOnlyConfig(), "weight=nvfp4, groups of 16"),
    ],
    ids=str,
)
def test_schemes_are_in_plain_words(config, text):
    model = nn.Sequential(nn.Linear(64, 32))
    pw.quantize_(model, config)
    assert repr(model[0]) == f"Linear(in_features=64, out_features=32, bias=True, {text})"


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_setstate(model):
    new = nn.Sequential()
    new.__setstate__(model.__getstate__())
    return new


def through_files(model, folder):
    pw.save(model, folder)
    return pw.load(folder, nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)))


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save, through_setstate, torch.compile],
    ids=["deepcopy", "pickle", "torch.save", "setstate", "compile"],
)
def test_copies_show_it_too(again):
    assert LINE in repr(again(quantized()))


def test_it_comes_with_load_and_goes_with_dequantize(tmp_path):
    loaded = through_files(quantized(), tmp_path)
    assert LINE in repr(loaded)
    pw.dequantize_(loaded)
    assert repr(loaded) == repr(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False)))


def test_nothing_in_the_model_changes():
    model, plain = quantized(), nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    repr(model)
    assert type(model[0]) is nn.Linear
    assert model[0].__dict__.keys() == plain[0].__dict__.keys()
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert nn.Linear.__call__ is nn.Module.__call__
    assert "extra_repr" not in model[0].__dict__
    assert repr(plain) == (
        "Sequential(\n  (0): Linear(in_features=64, out_features=32, bias=True)\n  (1): ReLU()\n"
        "  (2): Linear(in_features=32, out_features=16, bias=False)\n)"
    )


def test_frozen_layers_and_layers_with_parts():
    model = quantized()
    pw.inference.freeze_(model)
    assert "FrozenLinear(in_features=64, out_features=32, bias=True, weight=int4, groups of 32)" in repr(model)
    attention = nn.MultiheadAttention(64, 4)
    pw.quantize_(attention, "int8")
    lines = repr(attention).splitlines()
    assert lines[:2] == ["MultiheadAttention(", "  in_proj_weight=int8 per row"]
    assert "(out_proj): NonDynamicallyQuantizableLinear(in_features=64" in lines[2]


def test_models_of_transformers(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=3, **sizes))
    pw.quantize_(llama, "int8")
    assert "(0-2): 3 x LlamaDecoderLayer(" in repr(llama)  # equal layers still share a line
    shown = "(q_proj): Linear(in_features=64, out_features=64, bias=False, weight=int8 per row)"
    assert shown in repr(llama)
    llama.save_pretrained(tmp_path)
    assert shown in repr(LlamaForCausalLM.from_pretrained(tmp_path))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=2, n_positions=16))
    pw.quantize_(gpt2, "int8")
    assert "(c_fc): Conv1D(nf=256, nx=64, weight=int8 per row)" in repr(gpt2)


def test_a_sharded_weight(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = quantized()
        fully_shard(model)
        assert "weight=int4, groups of 32" in repr(model)
    finally:
        dist.destroy_process_group()


def test_wrapping_twice_shows_it_once():
    from pennyweight.core.module_repr import show_weights

    show_weights(nn.Module)
    assert repr(quantized()[0]).count("weight=") == 1
