"""Dynamic quantization of activations: int8 by int8, int8 by int4 and other widths, float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, filled, inputs, mlp, normal, raised, snippet, sqnr


@snippet(approx=Y)
def int8_by_int8() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    w = model[0].weight
    return {"codes": w.qdata, "scale": w.scale, "values": w.dequantize(), "y": model(inputs())}


SYMMETRIC = {"y": "inputs of 0.12 went to -127..127; ours follow the current release, -128..127"}


@snippet("0.12", differs=SYMMETRIC)
def int8_by_int8_older() -> dict[str, Any]:
    from torchao.quantization import int8_dynamic_activation_int8_weight, quantize_

    model = mlp()
    quantize_(model, int8_dynamic_activation_int8_weight())
    w = model[0].weight
    codes, scale, _zero = w.original_weight_tensor.tensor_impl.get_plain()
    return {"codes": codes, "scale": scale.flatten(), "y": model(inputs())}


@snippet(approx={"y": 2e-2})
def int8_by_int8_of_a_bfloat16_model() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = mlp(torch.bfloat16)
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return {"codes": model[0].weight.qdata, "y": model(inputs(dtype=torch.bfloat16))}


@snippet(approx=Y)
def int8_by_int8_asymmetric_inputs() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, MappingType, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC))
    return {"codes": model[0].weight.qdata, "y": model(inputs())}


@snippet(approx=Y)
def int8_by_int8_per_tensor() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()))
    return {"codes": model[0].weight.qdata, "y": model(inputs())}


@snippet(approx=Y)
def int8_by_int8_reduced_range() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt8WeightConfig(reduce_range=True))
    return {"codes": model[0].weight.qdata, "y": model(inputs())}


@snippet(approx=Y)
def three_dimensional_inputs() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return {"y": model(normal(2, 3, 64, seed=8)), "one": model(normal(64, seed=9)[None])}


@snippet(approx={"y": 1e-5})
def int8_by_int4_in_groups() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
    w = model[0].weight
    return {"codes": w.qdata, "scale": w.scale, "how": str(w.activation_quantization), "y": model(inputs())}


@snippet(approx={"y": 1e-5})
def int8_by_int4_asymmetric_weights() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, MappingType, PerGroup, quantize_

    model = mlp()
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(32), weight_mapping_type=MappingType.ASYMMETRIC
        ),
    )
    return {"codes": model[0].weight.qdata, "zero": model[0].weight.zero_point, "y": model(inputs())}


@snippet(approx={"y": 1e-5})
def int8_by_int8_per_axis() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8, weight_granularity=PerAxis(0)))
    return {"codes": model[0].weight.qdata, "y": model(inputs())}


@snippet(approx={"y": 1e-5})
def int8_by_int3() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int3, weight_granularity=PerGroup(16)))
    return {"codes": model[0].weight.qdata, "y": model(inputs())}


@snippet(approx={"y": 2e-2})
def int8_by_int4_bfloat16() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    model = mlp(torch.bfloat16)
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)))
    return {"codes": model[0].weight.qdata, "scale": model[0].weight.scale, "y": model(inputs(dtype=torch.bfloat16))}


@snippet("0.12", approx={"y": 1e-5})
def eight_da_four_w() -> dict[str, Any]:
    from torchao.quantization import int8_dynamic_activation_int4_weight, quantize_

    model = mlp()
    quantize_(model, int8_dynamic_activation_int4_weight(group_size=32))
    codes, scale, _zero = model[0].weight.original_weight_tensor.tensor_impl.get_plain()
    return {"codes": codes, "scale": scale, "y": model(inputs())}


@snippet("0.12", differs=SYMMETRIC)
def eight_da_four_w_symmetric_inputs() -> dict[str, Any]:
    from torchao.quantization import Int8DynamicActivationInt4WeightConfig, MappingType, quantize_

    model = mlp()
    quantize_(model, Int8DynamicActivationInt4WeightConfig(group_size=32, act_mapping_type=MappingType.SYMMETRIC))
    return {"y": model(inputs())}


@snippet("0.12", approx={"y": 1e-5})
def intx_in_the_q_dq_layout() -> dict[str, Any]:
    from torchao.dtypes import QDQLayout
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_

    model = mlp()
    quantize_(
        model,
        Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(32), layout=QDQLayout()
        ),
    )
    return {"y": model(inputs())}


@snippet()
def float8_by_float8_needs_a_gpu_there() -> dict[str, Any]:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    model, x = mlp(torch.bfloat16), inputs(dtype=torch.bfloat16)
    y = model(x)
    quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    assert sqnr(y, model(x)) > 25
    return {"shape": model[0].weight.shape}


@snippet(approx=Y)
def int8_static_per_tensor() -> dict[str, Any]:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerTensor, quantize_

    model = mlp()
    quantize_(
        model[0], Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor([[0.03]]), granularity=PerTensor())
    )
    return {"codes": model[0].weight.qdata, "y": model[0](inputs())}


@snippet(approx=Y)
def int8_static_weight_per_row() -> dict[str, Any]:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, PerTensor, quantize_

    model = mlp()
    quantize_(
        model[0],
        Int8StaticActivationInt8WeightConfig(
            act_quant_scale=torch.tensor([[0.03]]), granularity=[PerTensor(), PerRow()]
        ),
    )
    return {"codes": model[0].weight.qdata, "y": model[0](inputs())}


@snippet(approx=Y)
def int8_static_per_row_of_inputs() -> dict[str, Any]:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerRow, quantize_

    model, x = mlp(), inputs()
    scale = x.abs().amax(-1, keepdim=True) / 127
    quantize_(model[0], Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=PerRow()))
    return {"codes": model[0].weight.qdata, "kept": model[0].weight.act_quant_scale, "y": model[0](x)}


@snippet()
def a_static_config_without_a_scale_raises() -> dict[str, Any]:
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, quantize_

    return {"error": raised(lambda: quantize_(mlp(), Int8StaticActivationInt8WeightConfig())) != "nothing"}


@snippet(approx=Y)
def gradients_reach_other_layers() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    filled(model)
    quantize_(model[1], Int8WeightOnlyConfig())
    model(inputs()).sum().backward()
    return {"y": model[0].weight.grad}
