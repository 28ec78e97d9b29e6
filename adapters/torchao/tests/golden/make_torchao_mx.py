"""Write torchao_0.18_mx.safetensors: MX and NVFP4 of ordinary and special numbers, as torchao computes them; and
torchao_0.18_mx.pt, weights as its torch.save leaves them.

python make_torchao_mx.py       # in an environment with torchao 0.18.0; CPU

x.<name>                                inputs: "normal", "wide" (blocks from 2**-149 to 2**127), "bf16", "special"
                                        (NaN, infinities, zeros, extreme numbers, alone and among others)
mx.<name>.<element>.<mode>.scale, .qdata, .value      to_mx and to_dtype; bytes, and of mode "rceil" float32
mx.normal.<element>.floor.swizzled      scales in tensor-core order
nv.<name>.<levels>.scale, .qdata, .value, .outer      NVFP4Tensor.to_nvfp4; levels: 1, or 2 with a scale per tensor
experts.*                               to_nvfp4 of a batch, with a scale per matrix
qat.mx.*                                MXFakeQuantizedLinear: inputs, result, gradients
pickle.<name>                           values of the weights in torchao_0.18_mx.pt, and a scale of inputs
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.mx_formats import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.qat import MXFakeQuantizeConfig, MXFakeQuantizedLinear
from torchao.quantization import quantize_

assert version("torchao") == "0.18.0"
ELEMENTS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "e2m1": torch.float4_e2m1fn_x2,
}
SPECIAL = (
    float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4028234663852886e38, -1.9 * 2.0**127, 2.0**127, 2.0**120,
    2.0**-126, 2.0**-127, 1.5 * 2.0**-130, -(2.0**-149), 448.0, 465.0, -57344.0, 61441.0, 6.0, 7.5, 28.0, 2.5,
)  # fmt: skip

FLOOR, RCEIL = ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL
MODES = {"normal": [FLOOR], "wide": [*ScaleCalculationMode], "bf16": [FLOOR, RCEIL], "special": [*ScaleCalculationMode]}


def special(g):
    rows = []
    for number in SPECIAL:
        among = torch.randn(32, generator=g)
        among[5] = number
        alone = torch.zeros(32)
        alone[3] = number
        rows += [among, alone, torch.full((32,), number)]
    return torch.stack(rows)


def raw(t):
    return t.view(torch.uint8).clone()


def pickled():
    """(name, weight as quantize_ leaves it) for torch.save."""
    kinds = {
        "mxfp8": MXDynamicActivationMXWeightConfig(),
        "mxfp4": MXDynamicActivationMXWeightConfig(
            activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2
        ),
        "nvfp4": NVFP4WeightOnlyConfig(),
        "nvfp4_one": NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
        "nvfp4_static": NVFP4DynamicActivationNVFP4WeightConfig(step="convert"),
    }
    for name, config in kinds.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
        if name == "nvfp4_static":
            quantize_(model, NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
            model(torch.randn(4, 64, dtype=torch.bfloat16))
        quantize_(model, config)
        yield name, model[0].weight


def main():
    g = torch.Generator().manual_seed(0)
    x = {
        "normal": torch.randn(130, 32, generator=g),
        "wide": torch.randn(48, 32, generator=g) * torch.exp2(torch.randint(-149, 125, (48, 1), generator=g).float()),
        "bf16": torch.randn(16, 64, generator=g).bfloat16(),
        "special": special(g),
    }
    out = {f"x.{name}": value for name, value in x.items()}
    for name, value in x.items():
        for short, element in ELEMENTS.items():
            for mode in MODES[name]:
                scale, qdata = to_mx(value, element, 32, mode)
                key = f"mx.{name}.{short}.{mode.value}"
                out[f"{key}.scale"], out[f"{key}.qdata"] = raw(scale), raw(qdata)
                if mode is ScaleCalculationMode.RCEIL:
                    out[f"{key}.value"] = to_dtype(qdata, scale, element, 32, torch.float32)
            out[f"mx.normal.{short}.floor.swizzled"] = raw(to_mx(x["normal"], element, 32, is_swizzled_scales=True)[0])
        for levels in (1, 2):
            top = value.float().nan_to_num(0, 1e30, -1e30).abs().max()
            outer = per_tensor_amax_to_scale(top) if levels == 2 else None
            w = NVFP4Tensor.to_nvfp4(value, per_tensor_scale=outer)
            key = f"nv.{name}.{levels}"
            out[f"{key}.scale"], out[f"{key}.qdata"] = raw(w.scale), w.qdata
            if name == "special":
                out[f"{key}.value"] = w.dequantize(torch.float32)
            if outer is not None:
                out[f"{key}.outer"] = outer
    batch = torch.randn(3, 32, 64, generator=g)
    outer = per_tensor_amax_to_scale(batch.abs().amax((1, 2))).view(3, 1, 1)
    w = NVFP4Tensor.to_nvfp4(batch, per_tensor_scale=outer)
    out |= {"experts.x": batch, "experts.outer": outer, "experts.scale": raw(w.scale), "experts.qdata": w.qdata}
    out["experts.value"] = w.dequantize(torch.float32)

    config = MXFakeQuantizeConfig()
    layer = MXFakeQuantizedLinear(64, 32, True, config, config)
    layer.weight.data = torch.randn(32, 64, generator=g)
    layer.bias.data = torch.randn(32, generator=g)
    data = torch.randn(2, 5, 64, generator=g, requires_grad=True)
    y = layer(data)
    y.square().sum().backward()
    out |= {"qat.mx.x": data.detach(), "qat.mx.weight": layer.weight.detach(), "qat.mx.bias": layer.bias.detach()}
    out |= {"qat.mx.y": y.detach(), "qat.mx.grad_x": data.grad, "qat.mx.grad_weight": layer.weight.grad}
    weights = dict(pickled())
    torch.save(weights, Path(__file__).parent / "torchao_0.18_mx.pt")
    out |= {f"pickle.{name}": w.dequantize() for name, w in weights.items()}
    out["pickle.nvfp4_static.act"] = weights["nvfp4_static"].act_per_tensor_scale
    out = {name: value.contiguous() for name, value in out.items()}
    save_file(out, Path(__file__).parent / "torchao_0.18_mx.safetensors")


main()
