"""Reading all of a folder, as users do: what a process of its own needs, and little else to import."""

from pathlib import Path

import torch
from torch import nn

import pennyweight as pw


def finite(path: Path) -> int:
    """Every tensor of a folder is read, and has finite values; how many of them are quantized."""
    with pw.open(path) as checkpoint:
        for name in checkpoint:
            tensor = checkpoint[name]
            value = tensor.dequantize(torch.float32) if isinstance(tensor, pw.AffineQuantizedTensor) else tensor
            assert not value.is_floating_point() or bool(value.float().isfinite().all()), name
        return len(checkpoint.quantized)


def model_for(path: Path) -> nn.Module:
    """A float model of the shapes of a good folder."""
    root = nn.Module()
    with pw.open(path) as checkpoint:
        for name, held in checkpoint.held.items():
            *modules, last = name.split(".")
            here = root
            for module in modules:
                if module not in here._modules:
                    here.add_module(module, nn.Module())
                here = here.get_submodule(module)
            here.register_parameter(last, nn.Parameter(torch.full(held.kind.shape, 0.5, dtype=torch.float16)))
    return root
