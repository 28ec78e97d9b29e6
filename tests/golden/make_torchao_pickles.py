"""Write state dicts as torchao's own torch.save leaves them, and what their weights and layers compute.

    python make_torchao_pickles.py      # once for each release, in an environment with that torchao; CPU

Writes torchao_pickles/<version>_<name>.pt and <version>.safetensors (``<name>.weight``: dequantized; ``<name>.x``,
``<name>.y``: input and output of the layer). The version is that of the torchao which is installed. Under torch 2.13
release 0.12 needs ``construct_strides, maybe_realize`` imported from ``torch._inductor.kernel.flex.common``.
"""

import importlib
from importlib.metadata import version
from pathlib import Path

import torch
import torchao.quantization as q
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent / "torchao_pickles"
VERSION = version("torchao")


def found(path):
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f"torchao.{module}"), name, None)
    except ImportError:
        return None


def configs():
    layout, group = found("dtypes.Int4CPULayout"), found("quantization.PerGroup")
    yield "int8wo", found("quantization.Int8WeightOnlyConfig"), {}, torch.float32
    yield "int8dyn", found("quantization.Int8DynamicActivationInt8WeightConfig"), {}, torch.float32
    yield "8da4w", found("quantization.Int8DynamicActivationInt4WeightConfig"), {}, torch.float32
    yield "uint4", found("quantization.UIntXWeightOnlyConfig"), {"dtype": torch.uint4, "group_size": 32}, torch.float32
    yield "uint6", found("quantization.UIntXWeightOnlyConfig"), {"dtype": torch.uint6, "group_size": 32}, torch.float32
    yield "fp8wo", found("quantization.Float8WeightOnlyConfig"), {}, torch.bfloat16
    intx = {"weight_dtype": torch.int4, "granularity": group(32)}
    yield "intx4", found("quantization.IntxWeightOnlyConfig"), intx, torch.float32
    yield (
        "8dax4",
        found("quantization.Int8DynamicActivationIntxWeightConfig"),
        {"weight_dtype": torch.int4},
        torch.float32,
    )
    if layout is not None:
        int4 = {"group_size": 32, "layout": layout()}
        yield "int4cpu", found("quantization.Int4WeightOnlyConfig"), int4, torch.bfloat16
    yield (
        "int4opaque",
        found("prototype.quantization.int4.PrototypeInt4WeightOnlyConfig"),
        {"group_size": 32},
        torch.bfloat16,
    )


def value(w):
    w = getattr(w, "original_weight_tensor", w)
    if type(w).__name__ == "NF4Tensor":
        return w.get_original_weight()
    if type(w).__name__ == "Int4OpaqueTensor":  # has no dequantize
        return nn.functional.linear(torch.eye(w.shape[1], dtype=w.dtype), w).t()
    return w.dequantize()


def main():
    HERE.mkdir(exist_ok=True)
    out = {}
    for name, config, options, dtype in configs():
        if config is None:
            continue
        torch.manual_seed(0)
        layer = nn.Linear(64, 32, bias=False, dtype=dtype)
        x = torch.randn(5, 64, dtype=dtype)
        q.quantize_(nn.Sequential(layer), config(**options))
        torch.save(layer.state_dict(), HERE / f"{VERSION}_{name}.pt")
        out |= {f"{name}.x": x, f"{name}.y": layer(x), f"{name}.weight": value(layer.weight)}
    to_nf4 = found("dtypes.to_nf4") or found("quantization.to_nf4")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        name, w = f"nf4_{str(dtype).removeprefix('torch.')}", to_nf4(torch.randn(32, 64, dtype=dtype), 64, 32)
        torch.save({"weight": w}, HERE / f"{VERSION}_{name}.pt")
        out[f"{name}.weight"] = value(w)
    save_file(
        {k: v.detach().contiguous() for k, v in out.items()},
        HERE / f"{VERSION}.safetensors",
        {"torch": torch.__version__},
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
