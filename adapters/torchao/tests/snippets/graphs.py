"""torch.compile and torch.export of quantized models and of the functions on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, filled, inputs, mlp, normal, snippet


def _compiled(config: Any) -> dict[str, Any]:
    from torchao.quantization import quantize_

    model = mlp()
    quantize_(model, config)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    return {"y": compiled(inputs()), "eager": bool(torch.allclose(compiled(inputs()), model(inputs()), atol=1e-5))}


@snippet(approx=Y)
def int8_compiled() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig

    return _compiled(Int8WeightOnlyConfig())


@snippet(approx=Y)
def dynamic_int8_compiled() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return _compiled(Int8DynamicActivationInt8WeightConfig())


@snippet(approx={"y": 1e-5})
def intx_compiled() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return _compiled(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


@snippet(approx={"y": 1e-5})
def float8_compiled() -> dict[str, Any]:
    from torchao.quantization import Float8WeightOnlyConfig

    return _compiled(Float8WeightOnlyConfig())


@snippet(approx={"y": 1e-5})
def a_quantized_model_exported() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
    program = torch.export.export(model, (inputs(),), strict=True)
    return {"y": program.module()(inputs())}


class _FakeQuantized(nn.Linear):
    """A layer as a user writes one for ExecuTorch: ops that the graph keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.quantization.quant_primitives import (
            MappingType,
            choose_qparams_affine,
            dequantize_affine,
            quantize_affine,
        )

        block = (1, x.shape[-1])
        scale, zero = choose_qparams_affine(x, MappingType.ASYMMETRIC, block, torch.int8)
        codes = quantize_affine(x, block, scale, zero, torch.int8)
        x = dequantize_affine(codes, block, scale, zero, torch.int8, output_dtype=x.dtype)
        return torch.nn.functional.linear(x, self.weight, self.bias)


@snippet(approx=Y)
def operators_stay_whole_in_an_exported_graph() -> dict[str, Any]:
    layer = filled(_FakeQuantized(16, 8))
    with torch.no_grad():
        program = torch.export.export(layer, (normal(3, 16),), strict=True)
    names = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("torchao.")]
    return {"ops": names, "y": program.module()(normal(3, 16))}


@snippet(approx=Y)
def operators_stay_whole_without_dynamo() -> dict[str, Any]:
    layer = filled(_FakeQuantized(16, 8))
    with torch.no_grad():
        program = torch.export.export(layer, (normal(3, 16),), strict=False)
    names = [str(n.target) for n in program.graph.nodes if str(n.target).startswith("torchao.")]
    return {"ops": names, "y": program.module()(normal(3, 16))}


@snippet(approx=Y)
def functions_compiled() -> dict[str, Any]:
    layer = filled(_FakeQuantized(16, 8))
    torch._dynamo.reset()
    return {"y": torch.compile(layer, backend="aot_eager", fullgraph=True)(normal(3, 16))}
