"""Write torchao_0.18_moe_training.safetensors: grouped products in MXFP8 with their gradients.

python make_torchao_moe_training.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.quantization.quantize_.common import KernelPreference

assert version("torchao") == "0.18.0"
torch.manual_seed(0)
x, w, g = torch.randn(96, 64), torch.randn(3, 32, 64), torch.randn(96, 32)
ends = torch.tensor([32, 64, 96], dtype=torch.int32)
out = {"x": x, "w": w, "g": g, "ends": ends}
for mode in (ScaleCalculationMode.RCEIL, ScaleCalculationMode.FLOOR):
    for high in (False, True):
        a, b = x.bfloat16().requires_grad_(), w.bfloat16().requires_grad_()
        y = _to_mxfp8_then_scaled_grouped_mm(
            a, b.transpose(-2, -1), ends, kernel_preference=KernelPreference.EMULATED,
            wgrad_with_hp=high, scale_calculation_mode=mode,
        )  # fmt: skip
        y.backward(g.bfloat16())
        key = f"mxfp8.{mode.value}.{int(high)}"
        out |= {f"{key}.y": y.detach(), f"{key}.x": a.grad, f"{key}.w": b.grad}
path = Path(__file__).parent / "torchao_0.18_moe_training.safetensors"
save_file({k: v.clone().contiguous() for k, v in out.items()}, path, {"torchao": "0.18.0", "torch": version("torch")})
