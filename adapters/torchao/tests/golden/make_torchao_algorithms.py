"""Write torchao_algorithms_<release>.safetensors: what torchao's calibration-based algorithms choose.

python make_torchao_algorithms.py     # in an environment with torchao 0.12.0 or 0.18.0; CPU

The keys are <algorithm>.<case>.<role>; ``layer0.weight``, ``layer0.bias``, ``layer2.weight`` and ``x`` are the inputs.
"""

import copy
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import quantize_

torch.set_grad_enabled(False)
release = ".".join(version("torchao").split(".")[:2])
assert release in ("0.12", "0.18")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
x = torch.randn(2, 8, 128) * torch.linspace(0.1, 4, 128)
found = {"x": x, **{f"layer{name}": p for name, p in model.named_parameters()}}


def calibrated(q: nn.Module) -> nn.Module:
    for batch in x:
        q(batch)
    return q


def of_2026() -> None:
    from torchao.prototype.awq import AWQConfig
    from torchao.prototype.smoothquant import SmoothQuantConfig
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8StaticActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerTensor,
    )

    bases = {
        "weight_only": lambda: Int8WeightOnlyConfig(version=2),
        "dynamic": lambda: Int8DynamicActivationInt8WeightConfig(version=2),
        "static": lambda: Int8StaticActivationInt8WeightConfig(granularity=PerTensor()),
    }
    for name, base in bases.items():
        for algorithm, config in (("awq", AWQConfig), ("smooth", SmoothQuantConfig)):
            if (name, algorithm) == ("static", "awq"):
                continue
            q = copy.deepcopy(model)
            quantize_(q, config(base(), step="prepare"))
            calibrated(q)
            quantize_(q, config(base(), step="convert"))
            for i in (0, 2):
                w, key = q[i].weight, f"{algorithm}.{name}.{i}"
                found[f"{key}.act_pre_scale"], found[f"{key}.qdata"] = w.act_pre_scale, w.qdata
                found[f"{key}.scale"] = w.scale
                if name == "static":
                    found[f"{key}.act_quant_scale"] = w.act_quant_scale


def of_2025() -> None:
    from torchao.prototype.awq import AWQObservedLinear, awq_uintx, insert_awq_observer_
    from torchao.prototype.smoothquant import (
        SmoothQuantConfig,
        SmoothQuantObservedLinear,
        insert_smooth_quant_observer_,
    )

    def observed(kind: type):
        return lambda module, name: isinstance(module, kind)

    for dtype in (torch.uint3, torch.uint7):
        q, key = copy.deepcopy(model), f"awq.{str(dtype).removeprefix('torch.')}"
        insert_awq_observer_(q, 2, 8, dtype, group_size=32)
        for batch in x:
            q(batch[None])
        quantize_(q, awq_uintx(dtype, group_size=32), observed(AWQObservedLinear))
        for i in (0, 2):
            found[f"{key}.{i}.scale"] = q[i].weight.scale.reshape(-1)
            found[f"{key}.{i}.weight"] = q[i].weight.original_weight_tensor.dequantize()
    for mode in ("static", "dynamic"):
        for alpha in (0.5, 0.3, None):
            q, key = copy.deepcopy(model), f"smooth.{mode}_{alpha}"
            insert_smooth_quant_observer_(q, alpha, mode)
            calibrated(q)
            factor, act_scale, scales = copy.deepcopy(q[0].obs).calculate_qparams()
            found[f"{key}.factor"], found[f"{key}.scales"] = factor.reshape(-1), scales
            if act_scale is not None:
                found[f"{key}.act_scale"] = act_scale
            quantize_(q, SmoothQuantConfig(), observed(SmoothQuantObservedLinear))
            found[f"{key}.y"] = q(x[0])


of_2026() if release == "0.18" else of_2025()
out = Path(__file__).parent / f"torchao_algorithms_{release}.safetensors"
save_file(
    {name: t.detach().contiguous().clone() for name, t in found.items()},
    out,
    {"torchao": version("torchao"), "torch": version("torch")},
)
