"""QAT, optimizers with low-bit states, float8 training, training with quantized weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, filled, inputs, mlp, normal, snippet


def _prepared(base: Any) -> dict[str, Any]:
    """Fake-quantized outputs and gradients, then the converted model's outputs."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = mlp().train()
    quantize_(model, QATConfig(base, step="prepare"))
    y = model(inputs())
    y.sum().backward()
    gradient = model[0].weight.grad
    quantize_(model, QATConfig(base, step="convert"))
    return {"y": y, "gradient": gradient, "converted": model(inputs())}


QAT = {"y": 1e-5, "converted": 1e-5}
CLAMPED = {"gradient": "another one for the few weights whose code is clamped"}


@snippet(approx=QAT, differs=CLAMPED)
def qat_int8_by_int4() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

    return _prepared(Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))


@snippet(approx=QAT)
def qat_int4_weight_only() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return _prepared(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


@snippet(approx=QAT, differs=CLAMPED)
def qat_with_its_own_configs() -> dict[str, Any]:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = mlp().train()
    activation = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    weight = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model, QATConfig(activation_config=activation, weight_config=weight, step="prepare"))
    y = model(inputs())
    y.sum().backward()
    return {"y": y, "gradient": model[2].weight.grad}


@snippet(approx=QAT)
def qat_of_an_embedding() -> dict[str, Any]:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = filled(nn.Sequential(nn.Embedding(12, 64)))
    weight = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(
        model, QATConfig(weight_config=weight, step="prepare"), filter_fn=lambda m, name: isinstance(m, nn.Embedding)
    )
    return {"y": model(torch.tensor([0, 5, 11]))}


@snippet()
def fake_quantize_configs() -> dict[str, Any]:
    from torchao.quantization.qat import IntxFakeQuantizeConfig

    a = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    b = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    c = IntxFakeQuantizeConfig(torch.int4, "per_channel")
    return {
        "granularities": [repr(x.granularity) for x in (a, b, c)],
        "symmetric": [x.is_symmetric for x in (a, b, c)],
        "size": b.group_size,
    }


def _steps(make: Any, steps: int = 3, size: int = 4096) -> dict[str, Any]:
    weights = [nn.Parameter(normal(size // 64, 64, seed=1) * 0.1), nn.Parameter(normal(7, seed=2))]
    optimizer = make(weights)
    for step in range(steps):
        for seed, p in enumerate(weights):
            p.grad = normal(*p.shape, seed=10 * step + seed) * 0.01
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state[weights[0]]
    return {"weight": weights[0], "small": weights[1], "first": state["exp_avg"].dequantize(), "keys": sorted(state)}


# The second moment has other codes here, with a smaller error; the weights after three steps show it.
STATES = {"weight": 3e-3, "small": 1e-6, "first": 1e-6}


@snippet(approx=STATES)
def adamw_8_bit() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    return _steps(lambda p: AdamW8bit(p, lr=1e-2, weight_decay=0.1))


@snippet(approx=STATES)
def adam_8_bit() -> dict[str, Any]:
    from torchao.optim import Adam8bit

    return _steps(lambda p: Adam8bit(p, lr=1e-2))


@snippet(approx=STATES, differs={"first": "4-bit codes in other blocks"})
def adamw_4_bit() -> dict[str, Any]:
    from torchao.optim import AdamW4bit

    return _steps(lambda p: AdamW4bit(p, lr=1e-2), steps=1)


@snippet(approx=STATES)
def adamw_float8() -> dict[str, Any]:
    from torchao.optim import AdamWFp8

    return _steps(lambda p: AdamWFp8(p, lr=1e-2))


@snippet()
def small_parameters_keep_float_states() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    p = nn.Parameter(normal(64, seed=1))
    optimizer = AdamW8bit([p])
    p.grad = normal(64, seed=2)
    optimizer.step()
    return {"class": type(optimizer.state[p]["exp_avg"]).__name__}


@snippet(approx={"weight": 1e-5})
def an_optimizers_state_is_saved_and_loaded() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    p = nn.Parameter(normal(64, 64, seed=1))
    first = AdamW8bit([p], lr=1e-2)
    p.grad = normal(64, 64, seed=2)
    first.step()
    q = nn.Parameter(p.detach().clone())
    second = AdamW8bit([q], lr=1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for weight, optimizer in ((p, first), (q, second)):
        weight.grad = normal(64, 64, seed=3)
        optimizer.step()
    return {"same": torch.equal(p, q), "weight": q}


@snippet()
def a_tensor_as_learning_rate() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    optimizer = AdamW8bit([nn.Parameter(normal(8))], lr=0.5)
    lr = optimizer.param_groups[0]["lr"]
    return {"class": type(lr).__name__, "value": float(lr)}


@snippet()
def an_optimizer_with_groups_of_parameters() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    groups = [{"params": [nn.Parameter(normal(8))], "lr": 0.1}, {"params": [nn.Parameter(normal(4))]}]
    optimizer = AdamW8bit(groups, lr=0.2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    keys = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    return {"groups": [[round(float(g["lr"]), 6), *(g[k] for k in keys[1:])] for g in optimizer.param_groups]}


@snippet()
def a_step_with_a_closure() -> dict[str, Any]:
    from torchao.optim import AdamW8bit

    p = nn.Parameter(torch.ones(4))
    optimizer = AdamW8bit([p], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    return {"loss": float(optimizer.step(closure)), "moved": bool((p < 1).all())}


@snippet(approx=Y)
def int8_mixed_precision_training() -> dict[str, Any]:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    model = mlp().train()
    quantize_(model, Int8MixedPrecisionTrainingConfig())
    x = inputs()
    return {"y": model(x).shape, "trains": all(p.requires_grad for p in model.parameters())}
