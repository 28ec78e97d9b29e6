"""Quantizes, runs, explains, saves and loads on a device of another type, and prints what came out as JSON.

    python -m tests.kernels.other_device.program backend.so folder

The backend stays for the process, so tests start this file.
"""

from __future__ import annotations

import copy
import ctypes
import io
import json
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

NAME = "other"
SCHEMES = ("int8", "int8-dynamic", "int4", "8da4w", "float8", "float8-dynamic", "nf4", "mxfp8-dynamic", "fp6")


def register(library: str) -> None:
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module.current_device, module.device_count = lambda: 0, lambda: 1
    module.device = lambda device: nullcontext()
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    torch._register_device_module(NAME, module)
    ctypes.CDLL(library)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu() - b).norm() / b.norm())


def scheme(name: str, folder: Path) -> dict[str, Any]:
    import pennyweight as pw

    torch.manual_seed(0)
    base, x = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(5, 128)
    on_cpu, model, x_there = copy.deepcopy(base), copy.deepcopy(base).to(NAME), x.to(NAME)
    pw.quantize_(on_cpu, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pw.quantize_(model, name)
        y = model(x_there)
    want = on_cpu(x)
    weight: Any = model[0].weight
    found = {
        "warnings": [str(w.message) for w in caught],
        "layout": weight.spec.layout,
        "device": [str(y.device), *(str(p.device) for p in model.parameters())],
        "same weight": weight.dequantize().cpu().equal(on_cpu[0].weight.dequantize()),
        "distance": distance(y, want),
        "explain": str(pw.explain(torch.float32, weight)),
    }
    pw.save(model, folder / name)
    again = pw.load(folder / name, copy.deepcopy(base).to(NAME))
    found["loaded"] = again(x_there).cpu().equal(y.cpu())
    found["loaded there"] = str(pw.load(folder / name, device=NAME)["0.weight"].device)
    found["loaded on the CPU"] = distance(pw.load(folder / name, copy.deepcopy(base))(x), want)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    kept = torch.load(buffer)
    found["pickled"] = kept["0.weight"].dequantize().cpu().equal(weight.dequantize().cpu())
    found["moved there"] = distance(copy.deepcopy(on_cpu).to(NAME)(x_there), want)
    found["moved back"] = distance(copy.deepcopy(model).to("cpu")(x), want)
    return found


@torch.no_grad()
def main() -> None:
    library, folder = sys.argv[1:]
    register(library)
    print(json.dumps({name: scheme(name, Path(folder)) for name in SCHEMES}))


if __name__ == "__main__":
    main()
