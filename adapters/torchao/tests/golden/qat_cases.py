"""What torchao's QAT computes, by its own names: run with torchao to record, with ours to compare.

``run(torchao)`` gives {name: tensor}. Names that end in "~" come from float matmuls and are compared with a tolerance.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

INTX = {  # name -> arguments of IntxFakeQuantizeConfig
    **{
        f"int{bits} {mapping} {size}": {"dtype": f"int{bits}", "is_symmetric": mapping == "sym", **group}
        for bits in (2, 4, 8)
        for mapping in ("sym", "asym")
        for size, group in (("g32", {"group_size": 32}), ("row", {"granularity": "per_channel"}))
    },
    "uint4 tinygemm": {
        "dtype": "uint4", "is_symmetric": False, "group_size": 32, "zero_point_domain": "FLOAT",
        "scale_precision": "bfloat16", "zero_point_precision": "bfloat16",
    },
    "int4 bf16 scale": {"dtype": "int4", "group_size": 32, "scale_precision": "bfloat16"},
    "int4 eps": {"dtype": "int4", "group_size": 32, "eps": 0.7},
    "token": {"dtype": "int8", "granularity": "per_token", "is_symmetric": False},
    "token int4": {"dtype": "int4", "granularity": "per_token", "is_symmetric": False},
    "token eps": {"dtype": "int8", "granularity": "per_token", "is_symmetric": False, "eps": 0.1},
}  # fmt: skip


def numbers(*shape: int, seed: int) -> Tensor:
    """Integers in thousands, equal on every machine."""
    return torch.randint(-4000, 4000, shape, generator=torch.Generator().manual_seed(seed)).float() / 1000


def run(torchao: Any) -> dict[str, Tensor]:
    qat = torchao.quantization.qat
    out: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, config in _configs(torchao).items():
            x = numbers(3, 5, 64, seed=1) if name.startswith(("token", "float8")) else numbers(8, 64, seed=2)
            x[0] = x[0].abs() + 1
            if name in INTX:  # a scale of zero gives torchao's float8 a gradient of NaN
                x[1] *= 1e-30
                x[2] = 0
            out |= _one(f"{name} {str(dtype)[6:]}", qat.FakeQuantizerBase.from_config(config), x.to(dtype))
    int8, int4 = qat.Int8DynActInt4WeightQATQuantizer, qat.Int4WeightOnlyQATQuantizer
    embedding = qat.Int4WeightOnlyEmbeddingQATQuantizer
    out |= _steps("8da4w", int8(32))
    out |= _steps("8da4w bf16 scales", int8(32, scales_precision=torch.bfloat16))
    out |= _steps("embedding", embedding(32))
    out |= _steps("both", qat.ComposableQATQuantizer([int8(32), embedding(16)]))
    out |= _steps("4w", int4(32, 2), bias=False, dtype=torch.bfloat16)
    for symmetric in (True, False):
        out |= _learned(f"learned {symmetric}", torchao, symmetric)
    return out


def _configs(torchao: Any) -> dict[str, Any]:
    qat, found = torchao.quantization.qat, {}
    for name, arguments in INTX.items():
        given = dict(arguments)
        given["dtype"] = getattr(torch, given["dtype"])
        for key in ("scale_precision", "zero_point_precision"):
            if key in given:
                given[key] = getattr(torch, given[key])
        if "zero_point_domain" in given:
            given["zero_point_domain"] = torchao.quantization.quant_primitives.ZeroPointDomain[
                given["zero_point_domain"]
            ]
        found[name] = qat.IntxFakeQuantizeConfig(**given)
    float8, int4 = qat.Float8FakeQuantizeConfig, qat.fake_quantize_config.Int4WeightFakeQuantizeConfig
    found["float8"] = float8()
    found["float8 tensor"] = float8(torch.float8_e5m2, torchao.quantization.granularity.PerTensor())
    found["float8 bounds"] = float8(hp_value_lb=0.5, hp_value_ub=2.0)
    found["int4 for float8"] = int4(32)
    found["int4 for bfloat16"] = int4(32, torch.bfloat16)
    return found


def _one(name: str, quantizer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Values, gradient, scale and zero point of a fake quantizer."""
    x = x.clone().requires_grad_()
    y = quantizer(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)).sum().backward()
    found = {"y": y, "grad": x.grad}
    found |= {part: getattr(quantizer, part) for part in ("scale", "zero_point") if hasattr(quantizer, part)}
    return {f"{name}.{key}": value.detach().clone() for key, value in found.items()}


class Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(16, 64), nn.Linear(64, 128, bias=bias)
        self.second, self.odd = nn.Linear(128, 24, bias=bias), nn.Linear(24, 8)
        for seed, p in enumerate(self.parameters()):
            p.data = numbers(*p.shape, seed=seed) / 8

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(self.second(self.first(self.table(x)).relu()))


def _steps(name: str, quantizer: Any, bias: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Output and gradients of a prepared model, and output and state dict of the converted one."""
    model = Net(bias).to(dtype)
    if name == "4w":
        model.odd, model.second = nn.Identity(), nn.Linear(128, 32, bias=False, dtype=dtype)  # torch packs 16 rows
        model.second.weight.data = (numbers(32, 128, seed=9) / 8).to(dtype)
    ids = torch.arange(12).reshape(3, 4)
    model = quantizer.prepare(model)
    y = model(ids)
    y.float().square().mean().backward()
    found = {"prepared~": y, **{f"{n}.grad~": p.grad for n, p in model.named_parameters() if p.grad is not None}}
    model = quantizer.convert(copy.deepcopy(model))
    found["converted~"] = model(ids)
    # torch packs in the byte order of the processor
    found |= {f"state {n}": v for n, v in model.state_dict().items() if name != "4w" or n.endswith("zeros")}
    return {f"{name}.{key}": value.detach().clone() for key, value in found.items()}


def _learned(name: str, torchao: Any, symmetric: bool) -> dict[str, Tensor]:
    """A step of SGD on a model whose ranges are learned, and its output then."""
    qat = torchao.quantization.qat
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    for seed, p in enumerate(model.parameters()):
        p.data = numbers(*p.shape, seed=seed) / 8
    config = qat.IntxFakeQuantizeConfig(
        torch.int4, group_size=32, is_symmetric=symmetric, is_dynamic=False, range_learning=True,
        zero_point_precision=torch.float32,
    )  # fmt: skip
    torchao.quantization.quantize_(model, qat.QATConfig(weight_config=config, step="prepare"))
    x = numbers(6, 64, seed=9)
    qat.initialize_fake_quantizers(model, (x,))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model(x).square().mean().backward()
    optimizer.step()
    y = model(x)
    found = {"y~": y, **{f"state {n}~": v for n, v in model.state_dict().items()}}
    return {f"{name}.{key}": value.detach().clone() for key, value in found.items()}
