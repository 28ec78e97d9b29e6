"""Write torchao_0.18_float8.safetensors: outputs and gradients of a layer trained in float8.

python make_torchao_float8.py     # in an environment with torchao 0.18.0; CPU
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

assert version("torchao") == "0.18.0"
torch.manual_seed(0)
x, w, g = torch.randn(24, 48), torch.randn(48, 32), torch.randn(24, 32)
out = {"x": x, "w": w, "g": g}
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
path = Path(__file__).parent / "torchao_0.18_float8.safetensors"
out = {name: value.clone().contiguous() for name, value in out.items()}
save_file(out, path, {"torchao": version("torchao"), "torch": version("torch")})
