"""torchtune's QAT and QLoRA: its own modules where it is installed, and its use of torchao as it writes it."""

import copy
import importlib.util
import textwrap
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import forked

START = """
import copy, torch
import torch.nn.functional as F
import pennyweight_torchao
pennyweight_torchao.install()
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_params, get_merged_lora_ckpt, set_trainable_params
from torchtune.training import quantization as tune
shape = dict(vocab_size=128, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=32,
             intermediate_dim=128)
lora = dict(lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8)
torch.manual_seed(0)
tokens = torch.randint(0, 128, (2, 12))
def train(model, optimizer, steps, before=lambda step: None):
    losses = []
    for step in range(steps):
        before(step)
        logits = model(tokens)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 128).float(), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return losses
"""


def run(code: str) -> str:
    """In a process of its own, which has the alias before torchtune is imported."""
    if importlib.util.find_spec("torchtune") is None:
        pytest.skip("torchtune is not installed")
    script = textwrap.dedent(START) + textwrap.dedent(code)
    done = forked.run(["-W", "ignore", "-c", script])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_qat_of_torchtune() -> None:
    """Its recipe: prepare, train without fake quantization for three steps and with it for three, convert."""
    code = """
    quantizers = {
        torch.float32: [tune.Int8DynActInt4WeightQATQuantizer(32)],
        torch.bfloat16: [tune.Int8DynActInt4WeightQATQuantizerModuleSwap(32), tune.Int4WeightOnlyQATQuantizer(32, 2)],
    }
    for dtype, quantizer in [(dtype, q) for dtype, some in quantizers.items() for q in some]:
        model = llama3(**shape).to(dtype)
        names = set(model.state_dict())
        quantizer.precision = dtype
        mode = tune.get_quantizer_mode(quantizer)
        model = quantizer.prepare(model)
        off, on = tune._get_disable_fake_quant(mode), tune._get_enable_fake_quant(mode)
        switch = lambda step: model.apply(off) if step == 0 else model.apply(on) if step == 3 else None
        train(model, torch.optim.AdamW(model.parameters(), 1e-3), 6, switch)
        assert set(model.state_dict()) == names
        y = model.eval()(tokens)
        model = quantizer.convert(model)
        assert torch.equal(model(tokens), y), mode
        print("converted", mode)
    """
    assert run(code).count("converted") == 3


def test_qat_with_lora_of_torchtune() -> None:
    code = """
    model = lora_llama3(**shape, **lora)
    quantizer = tune.Int8DynActInt4WeightQATQuantizer(32)
    activation = quantizer.get_activation_fake_quantize_config()
    tune.swap_lora_linear_with_qat(model, activation, quantizer.get_weight_fake_quantize_config())
    set_trainable_params(model, get_adapter_params(model))
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), 4)
    merged = get_merged_lora_ckpt(copy.deepcopy(model.state_dict()), rank=4, alpha=8)
    assert set(merged) == set(llama3(**shape).state_dict())
    print("merged")
    """
    assert "merged" in run(code)


def test_qlora_and_low_bit_optimizers_of_torchtune() -> None:
    code = """
    from torchao.dtypes.nf4tensor import NF4Tensor
    from torchao.prototype.low_bit_optim import AdamW8bit
    shape |= dict(embed_dim=128, num_kv_heads=4, intermediate_dim=256)  # NF4 wants 256 blocks of 64, as torchao does
    model = lora_llama3(**shape, **lora, quantize_base=True)
    set_trainable_params(model, get_adapter_params(model))
    assert sum(isinstance(p, NF4Tensor) for p in model.parameters()) == 14
    train(model, AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-2), 4)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    merged = get_merged_lora_ckpt(state, rank=4, alpha=8)
    assert set(merged) == set(llama3(**shape).state_dict())
    plain = llama3(**shape)
    train(plain, AdamW8bit(plain.parameters(), lr=1e-3), 4)
    for quantizer in (tune.Int8DynActInt4WeightQuantizer(32), tune.Int4WeightOnlyQuantizer(32)):
        model = quantizer.quantize(copy.deepcopy(plain).to(torch.bfloat16))
        y, told = model(tokens), plain(tokens)
        assert (y - told).norm() < 0.5 * told.norm()
    print("quantized")
    """
    assert "quantized" in run(code)


# -- as it is written --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(32, 64), nn.Linear(64, 128, bias=False), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.table(x))))


def test_delayed_quantizers(torchao: ModuleType) -> None:
    """A quantizer found by its class, or by a subclass of a client, with another precision set on it."""
    from torchao.quantization.qat import Int4WeightOnlyQATQuantizer, Int8DynActInt4WeightQATQuantizer
    from torchao.quantization.qat.linear import (
        disable_4w_fake_quant,
        disable_8da4w_fake_quant,
        enable_4w_fake_quant,
        enable_8da4w_fake_quant,
    )

    class Swap(Int8DynActInt4WeightQATQuantizer):
        pass

    modes = {Int8DynActInt4WeightQATQuantizer: "8da4w", Swap: "8da4w", Int4WeightOnlyQATQuantizer: "4w"}
    switches = {
        "8da4w": (disable_8da4w_fake_quant, enable_8da4w_fake_quant),
        "4w": (disable_4w_fake_quant, enable_4w_fake_quant),
    }
    ids = torch.arange(8).reshape(2, 4)
    for make in (lambda: Swap(32), lambda: Int4WeightOnlyQATQuantizer(32, 2)):
        quantizer = make()
        quantizer.precision = torch.float32
        off, on = switches[modes[type(quantizer)]]
        model = Block()
        told = copy.deepcopy(model)
        model = quantizer.prepare(model)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, told)]
        model.apply(off)
        for step in range(4):
            if step == 2:
                model.apply(on)
            for m, optimizer in zip((model, told), optimizers, strict=True):
                m(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            same = all(torch.equal(p, q) for p, q in zip(model.parameters(), told.parameters(), strict=True))
            assert same == (step < 2)


def test_a_lora_layer_with_fake_quantizers(torchao: ModuleType) -> None:
    """F.linear(act(x), weight(w)) + (alpha / rank) B A x, with configs of a quantizer, checked by their older names."""
    from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer
    from torchao.quantization.qat.api import FakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import FakeQuantizer

    class Layer(nn.Linear):
        def __init__(self, activation: Any, weight: Any) -> None:
            super().__init__(64, 16, bias=False)
            assert isinstance(activation, FakeQuantizeConfig)
            assert isinstance(weight, FakeQuantizeConfig)
            assert self.in_features % weight.group_size == 0
            with pytest.warns(UserWarning, match="deprecated"):
                self.act, self.fake = FakeQuantizer(activation), FakeQuantizer(weight)
            self.weight.requires_grad_(False)
            self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.act(x), self.fake(self.weight)) + 2 * self.b(self.a(x))

    quantizer = Int8DynActInt4WeightQATQuantizer(32)
    layer = Layer(quantizer.get_activation_fake_quantize_config(), quantizer.get_weight_fake_quantize_config())
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None
    assert layer.a.weight.grad.any()
    converted = nn.Sequential(nn.Linear(64, 16, bias=False))
    converted[0].weight = layer.weight
    deployed = quantizer.convert(quantizer.prepare(converted))
    torch.testing.assert_close(y - 2 * layer.b(layer.a(x)), deployed(x.detach()), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="undefined"):
        _ = quantizer.get_activation_fake_quantize_config().group_size
