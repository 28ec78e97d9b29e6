"""Write torchao_0.12_quantized_training.safetensors and .pt: products and gradients of trainable weights, the weights.

python make_torchao_quantized_training.py     # in an environment with torchao 0.12.0; CPU

Not 0.18: from 0.15 on, Int8MixedPrecisionTrainingLinearWeight computes in full precision.
"""

from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torchao.prototype.quantized_training import bitnet, int8, int8_mixed_precision

assert version("torchao") == "0.12.0"
torch.manual_seed(0)
x, w, g, bias = torch.randn(24, 32), torch.randn(16, 32), torch.randn(24, 16), torch.randn(16)
out = {"x": x, "w": w, "g": g, "bias": bias}
Mixed, config = int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight, int8_mixed_precision
MAKE = {
    "int8": int8.Int8QuantizedTrainingLinearWeight.from_float,
    "mixed": lambda t: Mixed(t, config.Int8MixedPrecisionTrainingConfig()),
    "mixed_two": lambda t: Mixed(t, config.Int8MixedPrecisionTrainingConfig(grad_weight=False)),
    "bitnet": bitnet.BitNetTrainingLinearWeight,
}
for name, make in MAKE.items():
    p, leaf = torch.nn.Parameter(make(w), requires_grad=True), x.clone().requires_grad_()
    y = F.linear(leaf, p, bias)
    y.backward(g)
    out |= {f"{name}.y": y.detach(), f"{name}.x": leaf.grad, f"{name}.w": p.grad}
codes = torch.randint(-1, 2, (8, 16), dtype=torch.int8)
packed = bitnet.BitNetPacked2bitLinearWeight(bitnet._pack_i2_in_i8(codes), torch.tensor(0.3))
out |= {"packed.data": packed.int_data, "packed.value": packed.dequantize(), "packed.y": F.linear(x[:, :16], packed)}
half = int8.Int8QuantizedTrainingLinearWeight.from_float(w.bfloat16())
out |= {"half.codes": half.int_data, "half.scale": half.scale}
saved = {name: make(w) for name, make in MAKE.items()} | {"packed": packed}
torch.save(saved, Path(__file__).parent / "torchao_0.12_quantized_training.pt")
path = Path(__file__).parent / "torchao_0.12_quantized_training.safetensors"
save_file({k: v.clone() for k, v in out.items()}, path, {"torchao": "0.12.0", "torch": version("torch")})
