"""torchao.prototype.parq: its quantizers and training step by step, conversion, checkpoints."""

import copy
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pennyweight.compat.torchao.prototype import parq
from pennyweight.compat.torchao.prototype.parq import optim, quant
from pennyweight.compat.torchao.quantization import IntxUnpackedToInt8Tensor, MappingType, PerGroup
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.optim import AdamW8bit

GOLDEN = Path(__file__).parents[2] / "golden"
sys.path.append(str(GOLDEN))
from parq_runs import quantized, trained  # noqa: E402

TOLD = load_file(GOLDEN / "torchao_0.18_parq.safetensors")


def test_quantizers_give_torchao_numbers() -> None:
    got = quantized(quant)
    assert set(got) <= set(TOLD)
    for name, value in got.items():  # sums of a row differ in their last bit between processors
        torch.testing.assert_close(
            value, TOLD[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_training_steps_are_torchao_steps() -> None:
    got = trained(optim, quant)
    assert set(got) == set(TOLD) - set(quantized(quant))
    for name, value in got.items():
        torch.testing.assert_close(
            value, TOLD[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))


def _train(model: nn.Module, optimizer: Any, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 10, (32,), generator=generator)
        optimizer.zero_grad()
        loss = (model(ids) - torch.nn.functional.one_hot(ids, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _optimizer(model: nn.Sequential, base: Any = torch.optim.AdamW, **kwargs: Any) -> Any:
    groups = [
        {"params": [model[1].weight], "quant_bits": 3, "quant_block_size": 8},
        {"params": [model[3].weight], "quant_bits": 4},
        {"params": [model[0].weight, model[1].bias]},
    ]
    return parq.QuantOptimizer(
        base(groups, lr=0.05), quant.UnifTorchaoQuantizer(), optim.ProxHardQuant(), quant_period=1,
        quant_per_channel=True, group_quantizer_map={0: quant.StretchedUnifTorchaoQuantizer(3)}, **kwargs,
    )  # fmt: skip


@pytest.mark.parametrize("weight_only", [True, False])
def test_conversion_keeps_the_values_of_training(weight_only: bool) -> None:
    model = _model()
    optimizer = _optimizer(model)
    losses = _train(model, optimizer, 20)
    assert losses[-1] < 0.5 * losses[0]
    before = [model[1].weight.detach().clone(), model[3].weight.detach().clone()]
    optimizer.torchao_convert(model, weight_only=weight_only)
    assert not model.training
    assert type(model[0].weight) is nn.Parameter  # in no group with quant_bits
    for layer, value, dtype, block in ((model[1], before[0], torch.int3, 8), (model[3], before[1], torch.int4, 32)):
        w = layer.weight
        assert isinstance(w, IntxUnpackedToInt8Tensor)
        assert torch.equal(w.dequantize(), value)
        assert (w.target_dtype, tuple(w.block_size)) == (dtype, (1, block))
        assert w.activation_quantization == (None if weight_only else "int8_asym_per_token")
        assert "weight=AffineQuantizedTensor" in repr(layer)
    parts = IntxUnpackedToInt8Tensor.take(model[1].weight)
    again = IntxUnpackedToInt8Tensor(*parts.values())
    assert torch.equal(again.dequantize(), before[0])
    assert torch.equal(parts["zero_point"], torch.full((32, 2), -0.5))
    assert -4 <= int(parts["qdata"].min()) <= int(parts["qdata"].max()) <= 3
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert torch.equal(loaded["1.weight"].dequantize(), before[0])


def test_embeddings_are_weight_only_unless_tied() -> None:
    for tied in (False, True):
        model = _model()
        if tied:
            model._tied_weights_keys = {"3.weight": "0.weight"}
        groups = [{"params": [model[0].weight], "quant_bits": 4}, {"params": [model[3].weight], "quant_bits": 4}]
        optimizer = parq.QuantOptimizer(
            torch.optim.SGD(groups, lr=0.1), quant.UnifTorchaoQuantizer(), optim.ProxHardQuant(), 0, 1, True
        )
        _train(model, optimizer, 2)
        value = model[0].weight.detach().clone()
        optimizer.torchao_convert(model, embed_weight_only=not tied)
        assert model[0].weight.act is None
        assert model[3].weight.act is not None
        ids = torch.tensor([1, 5])
        assert torch.equal(model[0](ids), value[ids])


def test_values_without_a_config_are_refused_before_anything_changes() -> None:
    model = _model()
    groups = [{"params": [model[1].weight], "quant_bits": 2}]
    optimizer = parq.QuantOptimizer(torch.optim.SGD(groups, lr=0.1), quant.LSBQuantizer(), optim.ProxPARQ(0, 2))
    _train(model, optimizer, 4)
    value = model[1].weight.detach().clone()
    assert len(value.unique()) == 4
    with pytest.raises(ValueError, match=r"group 0 uses LSBQuantizer.*UnifTorchaoQuantizer"):
        optimizer.torchao_convert(model)
    assert model.training
    assert torch.equal(model[1].weight, value)


@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD, AdamW8bit])
def test_a_run_continues_from_its_state_dict(base: Any) -> None:
    model = _model()
    optimizer = _optimizer(model, base, warmup_steps=2)
    _train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert saved[1]["param_groups"][0]["num_steps"] == 5
    straight = _train(model, optimizer, 3)
    other = _model()
    again = _optimizer(other, base, warmup_steps=2)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert again.num_steps == 5
    assert _train(other, again, 3) == straight
    older = {**saved[1], "qat_state": {"num_steps": 4}}
    again.load_state_dict(older)
    assert again.num_steps == 4
    again.load_state_dict(older, start_step=3)
    assert again.num_steps == 3


def test_copies_pickles_schedulers_closures() -> None:
    model = _model()
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    _train(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    assert _train(model, optimizer, 3) == _train(twin, twin_optimizer, 3)
    assert repr(optimizer).startswith("QuantOptimizer (\n  AdamW (")
    assert repr(optimizer).endswith("quantizer='UnifTorchaoQuantizer'\n  prox_map='ProxHardQuant'\n)")
    seen = []

    def closure() -> torch.Tensor:
        seen.append(model[3].weight.detach().clone())
        return (model(torch.arange(10)) ** 2).mean()

    on_grid = model[3].weight.detach().clone()
    assert optimizer.step(closure).item() > 0
    assert torch.equal(seen[0], on_grid)  # the loss of the weights that the model has
    latent = optimizer.state[model[3].weight]["latent"]
    assert not torch.equal(latent, model[3].weight)
    optimizer.restore_latent_params()
    assert torch.equal(latent, model[3].weight)
    with torch.no_grad():
        model[3].weight += 1
    optimizer.save_latent_params()
    assert torch.equal(latent, model[3].weight)


def test_latents_can_be_saved_before_the_first_step() -> None:
    model = _model()
    optimizer = _optimizer(model)
    value = model[3].weight.detach().clone()
    optimizer.save_latent_params()
    with torch.no_grad():
        model[3].weight.zero_()
    optimizer.restore_latent_params()
    assert torch.equal(model[3].weight, value)
    optimizer.step()  # without gradients
    assert len(model[3].weight[0].unique()) <= 16
    assert torch.equal(optimizer.state[model[3].weight]["latent"], value)
    _train(model, optimizer, 2)  # the base still recognizes its first step


@pytest.mark.parametrize("per_channel", [False, True])
def test_convolutions_of_any_strides_and_float64(per_channel: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        weights = []
        for memory_format in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            conv = nn.Conv2d(4, 6, 3, dtype=dtype).to(memory_format=memory_format)
            base = torch.optim.SGD([{"params": [conv.weight], "quant_bits": 2}], lr=0.1)
            optimizer = parq.QuantOptimizer(
                base, quant.UnifQuantizer(), optim.ProxPARQ(0, 3), quant_per_channel=per_channel, quant_period=2
            )
            for _ in range(5):
                optimizer.zero_grad()
                conv(torch.ones(1, 4, 5, 5, dtype=dtype)).square().sum().backward()
                optimizer.step()
            weights.append(conv.weight.detach())
            assert len(conv.weight[0].unique()) <= 4
            assert optimizer.state[conv.weight]["quants"].dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-3)


def test_sharded_over_rows() -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(4, 8)
        results = []
        for value in (whole.clone(), distribute_tensor(whole.clone(), mesh, [Shard(0)])):
            p = nn.Parameter(value)
            base = torch.optim.SGD([{"params": [p], "quant_bits": 2}], lr=0.1)
            optimizer = parq.QuantOptimizer(
                base, quant.UnifQuantizer(), optim.ProxHardQuant(), quant_per_channel=True, quant_period=1
            )
            p.grad = torch.zeros_like(p)
            optimizer.step()
            results.append(p.full_tensor() if isinstance(p, DTensor) else p)
        assert isinstance(optimizer.state[p]["quants"], DTensor)
        assert torch.equal(results[0], results[1])
        optimizer.quant_per_channel = False
        with pytest.raises(ValueError, match="quant_per_channel=True"):
            optimizer.step()
    finally:
        destroy_process_group()


def test_groups_from_configs_and_filters() -> None:
    from pennyweight.compat.torchao.prototype.parq.api import (
        QuantConfig,
        create_optimizer,
        create_param_groups_and_group_quantizer_map,
    )

    model = _model()
    selection = [
        (QuantConfig(4), lambda m, name: isinstance(m, nn.Conv2d)),
        (QuantConfig(2, 16), lambda m, name: isinstance(m, nn.Linear) and name.endswith("weight")),
        (QuantConfig(4), lambda m, name: isinstance(m, nn.Embedding)),
    ]
    groups, quantizers = create_param_groups_and_group_quantizer_map(model, selection)
    assert [len(g["params"]) for g in groups] == [2, 1, 1]
    assert [g.get("quant_bits") for g in groups] == [2, 4, None]
    assert groups[0]["quant_block_size"] == 16
    assert groups[2]["weight_decay"] == 0.0
    assert [type(q).__name__ for q in quantizers.values()] == ["StretchedUnifTorchaoQuantizer", "UnifTorchaoQuantizer"]
    optimizer = create_optimizer(model, selection, torch.optim.AdamW, {"lr": 0.05})
    losses = _train(model, optimizer, 15)
    assert losses[-1] < losses[0]
    values = [model[i].weight.detach().clone() for i in (0, 1, 3)]
    assert len(values[1][0].unique()) <= 4
    optimizer.torchao_convert(model, weight_only=True)
    assert all(torch.equal(model[i].weight.dequantize(), v) for i, v in zip((0, 1, 3), values, strict=True))
    both = [(QuantConfig(4), lambda m, n: True), (QuantConfig(8), lambda m, n: n == "1.bias")]
    with pytest.raises(ValueError, match=r"multiple matching configs for 1\.bias"):
        create_param_groups_and_group_quantizer_map(_model(), both)
    with pytest.raises(ValueError, match="bitwidth must be >= 2"):
        QuantConfig(1)


def test_the_stretched_config() -> None:
    from pennyweight.compat.torchao.core.config import config_from_dict, config_to_dict
    from pennyweight.compat.torchao.quantization import quantize_

    config = parq.StretchedIntxWeightConfig(PerGroup(8), b=3, activation_quantization=None)
    assert config_from_dict(config_to_dict(config)) == config
    model = _model()
    want = model[1].weight.detach().clone()
    quantize_(model, config)
    scale, zero = quant.quant_api.choose_qparams_stretched_affine(
        want, MappingType.ASYMMETRIC, (1, 8), torch.int8, 3, quant_max=3.5
    )
    codes = quant.quant_api.quantize_stretched_affine(want, (1, 8), scale, zero, torch.int8, -3.5, 3.5)
    assert torch.equal(model[1].weight.dequantize(), ((codes.view(32, 2, 8) + 0.5) * scale).view(32, 16))
    x = torch.randn(3, 16)
    torch.testing.assert_close(model[1](x), nn.functional.linear(x, model[1].weight.dequantize(), model[1].bias))
    assert model[1].weight.spec.nbytes((32, 16)) == 32 * 16 * 3 / 8 + 32 * 2 * 4  # packed
    assert isinstance(model[1].weight, AffineQuantizedTensor)
    for wrong, says in (
        ({"granularity": PerGroup(7), "b": 2}, "groups of 7 do not divide 16"), ({}, "b, the number of bits"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            quantize_(_model(), parq.StretchedIntxWeightConfig(**wrong))
    with pytest.raises(ValueError, match="1 to 8 bits"):
        parq.StretchedIntxWeightConfig(b=9)
    with pytest.raises(ValueError, match=r"PerAxis\(0\) or PerGroup"):
        parq.StretchedIntxWeightConfig(MappingType.SYMMETRIC)


def test_rows_have_boundaries_of_their_own() -> None:
    bounds = torch.tensor([[-1.0, 0.0, 2.0], [0.0, 1.0, 5.0]])
    x = torch.tensor([[-1.0, 0.5, 3.0], [-1.0, 1.0, 5.5]])
    from pennyweight.compat.torchao.prototype.parq.utils import channel_bucketize, instantiate_module

    for right in (False, True):
        want = torch.stack([torch.bucketize(a, b, right=right) for a, b in zip(x, bounds, strict=True)])
        assert torch.equal(channel_bucketize(x, bounds, right=right), want)
    assert instantiate_module("torch.nn", "Linear") is nn.Linear
    slope = optim.parq.normalized_mirror_sigmoid
    assert [slope(t, 2, 4, 10, 0.5) for t in (2, 3)] == pytest.approx([1.0, 0.5])
    with pytest.raises(ValueError, match="t1 <= t < t2"):
        slope(4, 2, 4, 10, 0.5)
    with pytest.raises(ValueError, match="anneal_start must be before anneal_end"):
        optim.ProxPARQ(3, 3)
    with pytest.raises(ValueError, match="between 0 and 1"):
        _optimizer(_model(), anneal_wd_frac=2)
    optimizer = _optimizer(_model())
    optimizer.param_groups[0]["quant_block_size"] = 7
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=r"quant_block_size=7 needs .* got \[32, 16\]"):
        optimizer.step()


HF = """
import sys, torch
from pennyweight import compat
compat.install("torchao")
from torch import nn
from torchao.prototype.parq.optim import ProxHardQuant, QuantOptimizer
from torchao.prototype.parq.quant import StretchedUnifTorchaoQuantizer, UnifTorchaoQuantizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True))
embedding = model.model.embed_tokens.weight
linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not embedding]
base = torch.optim.AdamW([{"params": linear, "quant_bits": 2}, {"params": [embedding], "quant_bits": 4}])
optimizer = QuantOptimizer(base, UnifTorchaoQuantizer(), ProxHardQuant(), quant_period=1, quant_per_channel=True,
                           group_quantizer_map={0: StretchedUnifTorchaoQuantizer(2)})
ids = torch.randint(0, 64, (2, 9))
model(ids, labels=ids).loss.backward()
optimizer.step()
optimizer.torchao_convert(model)
print(sorted(model.config.quantization_config.quant_type.fqn_to_config))
model.save_pretrained(sys.argv[1])
again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.equal(again(ids).logits, model(ids).logits)
assert again.lm_head.weight is again.model.embed_tokens.weight
assert again.model.layers[0].mlp.up_proj.weight.spec.format.name == "half_int2"
"""


@pytest.mark.exhaustive
def test_a_transformers_model_gets_its_config(tmp_path: Path) -> None:
    """Saved and loaded by name; in a process of its own, because transformers asks for torchao when it is imported."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "ignore", "-c", HF, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("['_default', 'model.embed_tokens']")
