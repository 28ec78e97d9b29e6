"""Write torchao_0.18_optim.safetensors and torchao_0.18_optim.pt: quantized optimizer states and what they are made of.

python make_torchao_optim.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.optim import quant_utils, subclass_4bit, subclass_8bit, subclass_fp8
from torchao.optim.adam import single_param_adam

assert version("torchao") == "0.18.0"
SHAPE, BLOCK = (4, 256), 64
torch.manual_seed(0)
grad = torch.randn(SHAPE) * torch.logspace(-4, 0, SHAPE[1])
x = torch.randn(SHAPE)
out = {"x": x, "grad": grad}
for signed in (True, False):
    for bits, exponent in ((8, 7), (4, 3)) if signed else ((8, 7),):
        numbers = quant_utils.create_dynamic_map(signed, exponent, bits)
        out[f"map.{int(signed)}.{exponent}.{bits}"] = torch.tensor(numbers)
unit, out["scale"] = quant_utils.scale_tensor(x, BLOCK)
for signed in (True, False):
    y = unit if signed else unit.abs()
    for bits, module in ((8, subclass_8bit), (4, subclass_4bit)):
        qmap = torch.tensor(module.get_qmap_signed() if signed else module.get_qmap_unsigned())
        quantize = quant_utils.quantize_8bit_with_qmap if bits == 8 else quant_utils.quantize_4bit_with_qmap
        codes = quantize(y, qmap)
        out[f"codes.{int(signed)}.{bits}"] = codes
        out[f"value.{int(signed)}.{bits}"] = quant_utils.dequant_with_qmap(codes, qmap, out["scale"])

CLASSES = {
    "8bit": subclass_8bit.OptimState8bit,
    "4bit": subclass_4bit.OptimState4bit,
    "fp8": subclass_fp8.OptimStateFp8,
}
states = {}
for name, cls in CLASSES.items():
    make = cls.zeros if name == "fp8" else (lambda shape, block_size, cls=cls: cls.zeros(shape, True, block_size))
    first = make(SHAPE, block_size=BLOCK)
    second = cls.zeros(SHAPE, block_size=BLOCK) if name == "fp8" else cls.zeros(SHAPE, False, BLOCK)
    p = x.clone()
    for step in (1.0, 2.0):
        single_param_adam(
            p, grad, torch.tensor(step), first, second, None, torch.tensor(1e-2), 0.9, 0.999, 0.1, 1e-8, True, False
        )
        out[f"p{int(step)}.{name}"] = p.clone()
    out[f"first.{name}"], out[f"second.{name}"] = first.dequantize(), second.dequantize()
    states[name] = {"step": torch.tensor(2.0), "exp_avg": first, "exp_avg_sq": second}
folder = Path(__file__).parent
save_file(out, folder / "torchao_0.18_optim.safetensors", {"torchao": version("torchao"), "torch": version("torch")})
torch.save(states, folder / "torchao_0.18_optim.pt")
