"""torchao: eager, and compiled with frozen weights.

Its `Int4WeightOnlyConfig` has no packing that runs on a CPU; the prototype of the same scheme does. A compiled graph
holds all copies, because freezing packs weights as constants of the graph; one shape only, since each is compiled anew.
"""

from __future__ import annotations

import copy

import torch
import torchao
from torch import Tensor, nn

from .base import Bind, Competitor, Run, eager

FAMILY = "torchao"
COMPILED = (4096, 4096)


def versions() -> dict[str, str]:
    return {"torchao": torchao.__version__}


def _quantized(weight: Tensor, config: object) -> nn.Linear:
    from torchao.quantization import quantize_

    n, k = weight.shape
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    model = nn.Sequential(layer)
    quantize_(model, config)
    return model[0]


def _eager(config: object):
    def make(weight: Tensor, copies: int) -> Bind:
        layer = _quantized(weight, config)
        return eager([layer, *(copy.deepcopy(layer) for _ in range(copies - 1))], torch.bfloat16)

    return make


class _All(nn.Module):
    """All copies in one graph."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


def _compiled(config: object):
    def make(weight: Tensor, copies: int) -> Bind:
        import torch._inductor.config

        torch._inductor.config.freezing = True  # this process only
        layer = _quantized(weight, config)
        model = _All([layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]).eval()

        def bind(x: Tensor) -> Run:
            torch._dynamo.reset()
            run = torch.compile(model, dynamic=False)
            outputs = lambda some: [y for i, y in enumerate(run(x)) if i in some]  # noqa: E731
            return Run(lambda i: run(x), 1, outputs, copies, copies)

        return bind

    return make


def _one_shape(n: int, k: int, m: int) -> bool | str:
    return (n, k) == COMPILED or f"compiled for {COMPILED[0]}x{COMPILED[1]} only, compilation is slow"


def competitors(threads: int) -> list[Competitor]:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        PerGroup,
    )

    only = Int8WeightOnlyConfig(set_inductor_config=False)
    dynamic = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    g32, g128 = PrototypeInt4WeightOnlyConfig(32), PrototypeInt4WeightOnlyConfig(128)
    mixed = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))
    eager_rows = (
        ("torchao int8-dynamic", 8, 8, "int8", 0.017, dynamic),
        ("torchao int8 weight-only", 8, 8, "bf16", 0.012, only),
        ("torchao int4 g32 (prototype)", 4, 5, "bf16", 0.09, g32),
        ("torchao int4 g128 (prototype)", 4, 4.25, "bf16", 0.115, g128),
    )
    return [
        *(Competitor(name, FAMILY, *fields, _eager(config)) for name, *fields, config in eager_rows),
        Competitor(
            "torchao int8-dynamic-int4 g32", FAMILY, 4, 8.5, "int8", 0.11, _eager(mixed),
            lambda n, k, m: n * k <= 4096 * 4096 or "it takes seconds a call", "int8 codes of 4 bits",
        ),
        Competitor(
            "torchao int8-dynamic compiled", FAMILY, 8, 8, "int8", 0.02, _compiled(dynamic), _one_shape, "frozen"
        ),
        Competitor(
            "torchao int4 g128 compiled (prototype)", FAMILY, 4, 4.25, "bf16", 0.115, _compiled(g128), _one_shape,
            "frozen",
        ),
    ]  # fmt: skip
