"""Speed of an exported, statically quantized graph: float, converted, converted and compiled, lowered; in one run.

    python -m benchmarks.graph_mode             # with torch.compile, which needs a C++ compiler
    python -m benchmarks.graph_mode --eager     # without it

Milliseconds per call and the ratio to float: the fastest of rounds in which the variants take turns.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn

import pennyweight as pw
from pennyweight_torchao import graph_mode as gm

ROUNDS = 15


class Block(nn.Module):
    """A residual block: two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.b, self.nb = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.na(self.a(x)))
        return torch.relu(self.nb(self.b(y)) + x)


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Name -> model and input."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000)]
    mlp = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024)]
    return {
        "residual convolutions, 1x3x224x224": (
            nn.Sequential(*stem, Block(64), Block(64), *head),
            torch.randn(1, 3, 224, 224),
        ),
        "linear layers, 1 row": (nn.Sequential(*mlp), torch.randn(1, 1024)),
        "linear layers, 64 rows": (nn.Sequential(*mlp), torch.randn(64, 1024)),
    }


def variants(model: nn.Module, x: Tensor, compiled: bool) -> dict[str, Callable[[Tensor], Any]]:
    """The forms of one model."""
    model = model.eval()
    quantizer = gm.X86InductorQuantizer().set_global(gm.get_default_x86_inductor_quantization_config())
    prepared = gm.prepare(torch.export.export(copy.deepcopy(model), (x,)).module(), quantizer)  # type: ignore[arg-type]
    for _ in range(4):
        prepared(torch.randn_like(x))
    converted = gm.convert(prepared)
    found: dict[str, Callable[[Tensor], Any]] = {"float": model, "converted": converted}
    if compiled:
        found["converted, compiled"] = torch.compile(converted)
    found["lowered"] = pw.lower(converted).model
    return found


def times(forms: dict[str, Callable[[Tensor], Any]], x: Tensor) -> dict[str, float]:
    """Milliseconds of the fastest round; the forms take turns."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(2):
        for form in forms.values():
            form(x)
    for _ in range(ROUNDS):
        for name, form in forms.items():
            start = time.perf_counter()
            form(x)
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    # dynamo also reads it, so torch.compile(options=..) is not enough
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        for title, (model, x) in models().items():
            forms = variants(model, x, not arguments.eager)
            measured = times(forms, x)
            reference = forms["converted"](x)
            print(f"\n{title}")
            for name, ms in measured.items():
                error = (forms[name](x) - reference).norm() / reference.norm()
                print(f"  {name:22} {ms:9.3f} ms  {measured['float'] / ms:6.2f}x float  difference {float(error):.1e}")


if __name__ == "__main__":
    main()
