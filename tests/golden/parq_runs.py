"""Quantizers applied, and a small model trained with them: the same calls for torchao and for our names of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def quantized(quant: ModuleType) -> dict[str, Tensor]:
    """q and Q of every quantizer, over the tensor and per row. The weight has a zero and a constant row."""
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    weight[3], weight[4] = 0, 0.7
    ternary = quant.uniform.TernaryUnifQuantizer()
    affine = quant.uniform_torchao.UnifTorchaoQuantizer
    cases: list[tuple[str, Any, int]] = [
        ("uniform", quant.uniform.UnifQuantizer(), 2),
        ("uniform centred", quant.uniform.UnifQuantizer(center=True), 3),
        ("max", quant.uniform.MaxUnifQuantizer(), 2),
        ("asymmetric", quant.uniform.AsymUnifQuantizer(), 3),
        ("ternary", ternary, 0),
        *((f"greedy {b}", quant.lsbq.LSBQuantizer(), b) for b in (0, 1, 3)),
        *((f"optimal {b}", quant.lsbq.LSBQuantizer(optimal=True), b) for b in (0, 2)),
        ("affine", affine(), 4),
        ("affine asymmetric", affine(quant.uniform_torchao.MappingType.ASYMMETRIC), 3),
        ("int4", quant.uniform_torchao.Int4UnifTorchaoQuantizer(), 4),
        ("stretched", quant.uniform_torchao.StretchedUnifTorchaoQuantizer(3), 3),
    ]
    out = {}
    for name, quantizer, bits in cases:
        for dim in (None, -1):
            q, values = quantizer.quantize(weight, bits, dim=dim)
            out[f"{name} {dim} q"], out[f"{name} {dim} values"] = q.clone(), values.clone()
    return out


def trained(optim: ModuleType, quant: ModuleType) -> dict[str, Tensor]:
    """Losses, final weights and what the state dict holds, for three maps."""
    runs: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
        "parq": (
            quant.uniform.UnifQuantizer(), optim.parq.ProxPARQ(2, 8, steepness=4), {"quant_bits": 2},
            {"warmup_steps": 1, "quant_period": 2, "anneal_wd_frac": 0.5},
        ),
        "relax": (
            quant.lsbq.LSBQuantizer(), optim.binarelax.ProxBinaryRelax(1, 7), {"quant_bits": 2},
            {"warmup_steps": 2, "quant_period": 3, "quant_per_channel": True, "quant_shrink": True},
        ),
        "hard": (
            quant.uniform_torchao.UnifTorchaoQuantizer(), optim.proxmap.ProxHardQuant(),
            {"quant_bits": 4, "quant_block_size": 8}, {"quant_period": 1, "quant_per_channel": True},
        ),
    }  # fmt: skip
    out = {}
    for name, (quantizer, prox_map, keys, options) in runs.items():
        noise = torch.Generator().manual_seed(1)
        first, second = torch.randn(8, 16, generator=noise) / 4, torch.randn(4, 8, generator=noise) / 4
        first, second, bias = nn.Parameter(first), nn.Parameter(second), nn.Parameter(torch.zeros(4))
        x, y = torch.randn(32, 16, generator=noise), torch.randn(32, 4, generator=noise)
        base = torch.optim.AdamW([{"params": [first, second], **keys}, {"params": [bias]}], lr=0.05)
        optimizer = optim.quantopt.QuantOptimizer(base, quantizer, prox_map, **options)
        losses = []
        for _ in range(10):
            loss = ((x @ first.t()).relu() @ second.t() + bias - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        state = optimizer.state_dict()
        out[f"{name} losses"] = torch.stack(losses)
        for i, p in enumerate((first, second)):
            out[f"{name} weight {i}"] = p.detach().clone()
            out.update({f"{name} {key} {i}": state["state"][i][key].clone() for key in ("latent", "quants")})
        group = state["param_groups"][0]
        told = [group["num_steps"], group["cumu_lr"], group["weight_decay"], group.get("inv_slope", 0.0)]
        out[f"{name} group"] = torch.tensor(told, dtype=torch.float64)
    return out
