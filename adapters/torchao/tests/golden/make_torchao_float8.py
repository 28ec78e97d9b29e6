"""Write torchao_0.18_float8.safetensors and .pt: casts to float8 for training, products, and a layer's gradients.

python make_torchao_float8.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig

assert version("torchao") == "0.18.0"
torch.manual_seed(0)
x, w, g = torch.randn(24, 48), torch.randn(48, 32), torch.randn(24, 32)
out = {"x": x, "w": w, "g": g}
EMULATE = LinearMMConfig(*[ScaledMMConfig(emulate=True)] * 3)
CASTS = {"ten": (ScalingGranularity.TENSORWISE, None), "axs": (ScalingGranularity.AXISWISE, -1)}
for name, (granularity, dim) in CASTS.items():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for hp in (torch.float32, torch.bfloat16):
            for power in (False, True):
                t = hp_tensor_to_float8_dynamic(
                    x.to(hp), dtype, EMULATE, scaling_granularity=granularity, axiswise_dim=dim,
                    round_scales_to_power_of_2=power,
                )  # fmt: skip
                key = f"cast.{name}.{str(dtype)[13:]}.{str(hp)[6:]}.{int(power)}"
                out[f"{key}.data"], out[f"{key}.scale"] = t._data.view(torch.uint8), t._scale
                out[f"{key}.value"] = t.to_original_precision().to(hp).float()
    a = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, EMULATE, scaling_granularity=granularity, axiswise_dim=dim)
    b = hp_tensor_to_float8_dynamic(
        w, torch.float8_e4m3fn, EMULATE, gemm_input_role=GemmInputRole.WEIGHT, scaling_granularity=granularity,
        axiswise_dim=None if dim is None else 0,
    )  # fmt: skip
    out[f"mm.{name}"] = torch.mm(a, b)
    out[f"addmm.{name}"] = torch.addmm(torch.arange(32.0), a, b)
for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
    made = Float8LinearConfig.from_recipe_name(recipe)
    fields = {name: getattr(made, name) for name in made.__dataclass_fields__}
    layer = torch.nn.Linear(48, 32)
    layer.weight.data.copy_(w.t())
    layer.bias.data.copy_(torch.arange(32.0))
    layer = Float8Linear.from_float(layer, Float8LinearConfig(**{**fields, "emulate": True}))
    inputs = x.clone().requires_grad_()
    y = layer(inputs)
    y.backward(g)
    values = {"y": y.detach(), "x": inputs.grad, "w": layer.weight.grad, "b": layer.bias.grad}
    out |= {f"layer.{recipe}.{name}": value for name, value in values.items()}
rows = hp_tensor_to_float8_dynamic(
    x, torch.float8_e4m3fn, EMULATE, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1
)
torch.save(rows, Path(__file__).parent / "torchao_0.18_float8.pt")
path = Path(__file__).parent / "torchao_0.18_float8.safetensors"
out = {name: value.clone().contiguous() for name, value in out.items()}
save_file(out, path, {"torchao": version("torchao"), "torch": version("torch")})
