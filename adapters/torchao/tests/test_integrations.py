"""Libraries over torchao, on ours, unmodified and offline: QAT of a transformers model, PEFT's merges, diffusers."""

from pathlib import Path

import pytest

from adapters.torchao.tests.test_transformers import run


def test_qat_of_a_transformers_model(tmp_path: Path) -> None:
    """The prepared model is saved as the float model, and the converted one as a quantized one."""
    code = """
    from torchao.quantization.qat import FakeQuantizedLinear, QATConfig
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    inner = lambda m, fqn: isinstance(m, torch.nn.Linear) and "lm_head" not in fqn
    model = LlamaForCausalLM.from_pretrained(folder / "float")
    names = list(model.state_dict())
    quantize_(model, QATConfig(base, step="prepare"), inner)
    assert sum(isinstance(m, FakeQuantizedLinear) for m in model.modules()) == 14
    assert list(model.state_dict()) == names
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    logits = model(input_ids=ids).logits
    model.save_pretrained(folder / "prepared")
    again = LlamaForCausalLM.from_pretrained(folder / "prepared")
    quantize_(again, QATConfig(base), inner)
    assert torch.equal(again(input_ids=ids).logits, logits)
    quantize_(model, QATConfig(base, step="convert"), inner)
    assert torch.equal(model(input_ids=ids).logits, logits)
    model.save_pretrained(folder / "converted")
    again = LlamaForCausalLM.from_pretrained(folder / "converted")
    assert isinstance(again.model.layers[0].mlp.up_proj.weight, pw.AffineQuantizedTensor)
    assert torch.equal(again(input_ids=ids).logits, logits)
    print("trained")
    """
    assert "trained" in run(code, tmp_path)


@pytest.mark.exhaustive
def test_embeddings_and_optimizers_of_transformers(tmp_path: Path) -> None:
    code = """
    from transformers import Trainer, TrainingArguments
    linear = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    embedding = IntxWeightOnlyConfig(torch.int8, PerAxis(0))
    config = FqnToConfig({"_default": linear, "model.embed_tokens": embedding})
    for untie in (True, False):
        told = TorchAoConfig(config, include_input_output_embeddings=True, untie_embedding_weights=untie)
        said = {k: v for k, v in told.to_dict().items() if k != "quant_method"}
        assert TorchAoConfig.from_dict(said).quant_type == config
        model = LlamaForCausalLM.from_pretrained(folder / "float", quantization_config=told)
        quantized = [isinstance(m.weight, pw.AffineQuantizedTensor)
                     for m in (model.model.embed_tokens, model.lm_head, model.model.layers[0].self_attn.q_proj)]
        assert quantized == [True, not untie, True], quantized
        model.save_pretrained(folder / "saved")
        assert tokens(LlamaForCausalLM.from_pretrained(folder / "saved")) == tokens(model)
    rows = [{"input_ids": ids[0], "labels": ids[0]}] * 8
    for name, kind in (("adamw_torch_8bit", "AdamW8bit"), ("adamw_torch_4bit", "AdamW4bit")):
        model = LlamaForCausalLM.from_pretrained(folder / "float")
        told = TrainingArguments(output_dir=str(folder / "t"), optim=name, max_steps=2, report_to=[], use_cpu=True,
                                 save_strategy="no", disable_tqdm=True)
        trainer = Trainer(model, told, train_dataset=rows)
        trainer.train()
        assert type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__ == kind
    print("trained")
    """
    assert "trained" in run(code, tmp_path)


PEFT = {  # kind -> its arguments
    "LoraConfig": "r=4, lora_alpha=8, init_lora_weights=False",
    "LoraConfig of DoRA": "r=4, lora_alpha=8, init_lora_weights=False, use_dora=True",
    "VeraConfig": "r=8",
    "FourierFTConfig": "",
    "HRAConfig": "",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig()", "Int8DynamicActivationInt8WeightConfig()", "Float8WeightOnlyConfig()"]
)
def test_adapters_merge_and_unmerge(config: str, tmp_path: Path) -> None:
    """Up to the rounding of the merged weight; a saved adapter gives the same logits."""
    pytest.importorskip("peft")
    code = f"""
    import peft
    def base():
        model = LlamaForCausalLM.from_pretrained(folder / "float", quantization_config=TorchAoConfig({config}))
        return model.eval()
    limit = 0.08 if "Float8" in {config!r} else 0.03
    for name, arguments in {PEFT!r}.items():
        kind = getattr(peft, name.split()[0])
        adapter = eval(f"kind(target_modules=['q_proj', 'v_proj'], {{arguments}})")
        model = peft.get_peft_model(base(), adapter).eval()
        told = model(input_ids=ids).logits
        for step in (model.merge_adapter, model.unmerge_adapter):
            step()
            error = ((model(input_ids=ids).logits - told).norm() / told.norm()).item()
            assert error < limit, (name, step.__name__, error)
        model = peft.get_peft_model(base(), adapter).eval()
        told = model(input_ids=ids).logits
        model.save_pretrained(folder / "adapter")
        again = peft.PeftModel.from_pretrained(base(), folder / "adapter").eval()
        assert torch.equal(again(input_ids=ids).logits, told), name
        merged = model.merge_and_unload()
        assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, pw.AffineQuantizedTensor), name
    print("merged")
    """
    assert "merged" in run(code, tmp_path)


@pytest.mark.exhaustive
def test_diffusers(tmp_path: Path) -> None:
    """A transformer is quantized on load, saved, reloaded, offloaded, and fused with an adapter."""
    pytest.importorskip("diffusers")
    code = """
    from diffusers import FluxTransformer2DModel, TorchAoConfig
    kind = FluxTransformer2DModel
    kind(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
         joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8]).save_pretrained(folder / "flux")
    inputs = dict(hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 8, 32),
                  pooled_projections=torch.randn(1, 32), timestep=torch.tensor([1.0]), img_ids=torch.zeros(16, 3),
                  txt_ids=torch.zeros(8, 3))
    def load(config, name="flux"):
        more = {} if config is None else {"quantization_config": TorchAoConfig(config)}
        return kind.from_pretrained(folder / name, torch_dtype=torch.float32, **more)
    def quantized(model):
        return sum(isinstance(p, pw.AffineQuantizedTensor) for p in model.parameters())
    with torch.no_grad():
        exact = load(None)(**inputs).sample
        configs = {
            "int8": Int8WeightOnlyConfig(), "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
            "int4": Int4WeightOnlyConfig(group_size=16), "float8": Float8WeightOnlyConfig(),
            "by name": FqnToConfig({"re:.*attn.*": Int8WeightOnlyConfig()}),
        }
        for name, config in configs.items():
            model = load(config)
            y = model(**inputs).sample
            error = ((y - exact).norm() / exact.norm()).item()
            assert 0 < error < (0.3 if name == "int4" else 0.15), (name, error)
            assert quantized(model) == (11 if name == "by name" else 28), name
            model.save_pretrained(folder / "saved")
            again = load(None, "saved")
            assert quantized(again) == quantized(model), name
            assert torch.equal(again(**inputs).sample, y), name
        model = load(Int8WeightOnlyConfig())
        y = model(**inputs).sample
        model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")
        assert torch.equal(model(**inputs).sample, y)
    try:
        from peft import LoraConfig
    except ImportError:
        print("drawn")
        sys.exit()
    model = load(Int8WeightOnlyConfig())
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k"], init_lora_weights=False))
    y = model(**inputs).sample
    y.sum().backward()
    for step in (model.fuse_lora, model.unfuse_lora):
        step()
        error = ((model(**inputs).sample - y).norm() / y.norm()).item()
        assert error < 0.03, (step.__name__, error)
    print("drawn")
    """
    assert "drawn" in run(code, tmp_path)
