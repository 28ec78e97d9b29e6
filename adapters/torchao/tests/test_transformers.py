"""transformers and PEFT, which name torchao, on ours: unmodified, offline, a small Llama with random weights."""

import textwrap
from pathlib import Path

import pytest

from tests import forked

pytest.importorskip("transformers")

START = """
import os, sys, json, torch
from pathlib import Path
os.environ["HF_HUB_OFFLINE"] = "1"
import pennyweight as pw
import pennyweight_torchao
pennyweight_torchao.install()
from torchao.quantization import *
from transformers import LlamaConfig, LlamaForCausalLM, TorchAoConfig
folder = Path(sys.argv[1])
torch.manual_seed(0)
shape = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ids = torch.randint(3, 256, (2, 9))
def tokens(model):
    return model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False).tolist()
def native(config, dtype=torch.float32):
    model = LlamaForCausalLM.from_pretrained(folder / "float", dtype=dtype)
    pw.quantize_(model.model, config)
    return model
LlamaForCausalLM(shape).save_pretrained(folder / "float")
"""


def run(code: str, folder: Path) -> str:
    """In a process of its own: transformers asks for torchao when it is imported."""
    script = textwrap.dedent(START) + textwrap.dedent(code)
    done = forked.run(["-W", "ignore", "-c", script, str(folder)])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


CONFIGS = {
    "int8 weight-only": "Int8WeightOnlyConfig()",
    "int8 dynamic": "Int8DynamicActivationInt8WeightConfig()",
    "int4 weight-only": "Int4WeightOnlyConfig(group_size=32)",
    "8da4w": "Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))",
    "float8 weight-only": "Float8WeightOnlyConfig()",
    "by name": "FqnToConfig({'re:model.*attn.*_proj': Int8WeightOnlyConfig(), '_default': IntxWeightOnlyConfig()})",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_on_load_saved_reloaded_and_generating(name: str, tmp_path: Path) -> None:
    """The same tokens as our own quantize_ gives, at each step."""
    code = f"""
    config = {CONFIGS[name]}
    model = LlamaForCausalLM.from_pretrained(folder / "float", quantization_config=TorchAoConfig(config))
    weights = {{n: p for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}}
    assert len(weights) == 14, list(weights)
    told = None if isinstance(config, FqnToConfig) else tokens(native(config))
    mine = tokens(model)
    assert told is None or mine == told, (mine, told)
    model.save_pretrained(folder / "saved")
    again = LlamaForCausalLM.from_pretrained(folder / "saved")
    for n, p in again.named_parameters():
        if n in weights:
            assert isinstance(p, pw.AffineQuantizedTensor), n
            assert torch.equal(p.dequantize(), weights[n].dequantize()), n
    assert tokens(again) == mine
    print("quantized", type(again.config.quantization_config.quant_type).__name__)
    """
    assert "quantized" in run(code, tmp_path)


def test_lora_trains_on_it_and_merges(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    code = """
    from peft import LoraConfig, get_peft_model
    model = LlamaForCausalLM.from_pretrained(
        folder / "float", quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    base = {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    lora = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    names = {type(m).__name__ for m in lora.modules()}
    assert "TorchaoLoraLinear" in names, names
    optimizer = torch.optim.Adam([p for p in lora.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(30):
        loss = lora(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    lora.eval()
    with torch.no_grad():
        before = lora(input_ids=ids).logits
        merged = lora.merge_and_unload()
        after = merged(input_ids=ids).logits
    weights = {n: p for n, p in merged.named_parameters() if "q_proj" in n or "v_proj" in n}
    kept = [n for n, m in merged.named_modules() if n.endswith(("q_proj", "v_proj"))
            and isinstance(m.weight, pw.AffineQuantizedTensor)]
    assert len(kept) == 4, kept
    error = ((after - before).norm() / before.norm()).item()
    assert error < 0.05, error
    changed = merged.model.layers[0].self_attn.q_proj.weight.dequantize()
    assert not torch.equal(changed, base["model.layers.0.self_attn.q_proj.weight"])
    print("merged", error, losses[0], losses[-1])
    """
    assert "merged" in run(code, tmp_path)
