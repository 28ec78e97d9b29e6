"""Adapters of PEFT on a base that is fake-quantized: what they learn fits the weights that will be deployed."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.integrations.peft import merge_and_report

W4 = pw.Int4WeightOnlyConfig(group_size=32)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def base_layers(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear) and "lora_" not in fqn


@torch.no_grad()
def run(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@pytest.mark.parametrize("first", ["prepared", "adapted"])
def test_adapters_learn_on_the_weights_that_will_be_deployed(first: str) -> None:
    base, x = network(), torch.randn(32, 64)
    wanted = run(base, x)
    lora = LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=True)
    if first == "prepared":
        pw.quantize_(base, pw.QATConfig(W4))
        model = get_peft_model(base, lora)
    else:
        model = get_peft_model(base, lora)
        pw.quantize_(model, pw.QATConfig(W4), base_layers)
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    optimizer, losses = torch.optim.Adam(trained, 3e-3), []
    for _ in range(60):
        loss = (model(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3
    assert all(torch.equal(model.get_parameter(n), w) for n, w in weights.items())
    model.eval()
    y = run(model, x)
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(run(model, x), y)
    quantized = [n for n, p in model.named_parameters() if isinstance(p, AffineQuantizedTensor)]
    assert quantized == ["base_model.model.0.base_layer.weight", "base_model.model.2.base_layer.weight"]
    merged, report = merge_and_report(copy.deepcopy(model))
    assert len(report.rows) == 2
    assert isinstance(merged[0].weight, AffineQuantizedTensor)
