"""Weight-only quantization: int8, int4, any width, unsigned, small floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import Y, filled, inputs, mlp, normal, snippet, sqnr


@snippet(approx=Y)
def int8_per_row() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, x = mlp(), inputs()
    quantize_(model, Int8WeightOnlyConfig())
    w = model[0].weight
    return {
        "codes": w.qdata,
        "scale": w.scale,
        "values": w.dequantize(),
        "y": model(x),
        "dtype": w.dtype,
        "shape": w.shape,
    }


@snippet(approx={"y": 2e-2})
def int8_of_a_bfloat16_model() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig())
    w = model[2].weight
    return {"codes": w.qdata, "scale": w.scale, "y": model(inputs(dtype=torch.bfloat16)), "dtype": w.dtype}


@snippet(approx=Y)
def int8_in_groups() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig(granularity=PerGroup(32)))
    w = model[0].weight
    return {"codes": w.qdata, "scale": w.scale, "block": list(w.block_size), "y": model(inputs())}


@snippet(approx=Y)
def int8_per_tensor() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, PerTensor, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig(granularity=PerTensor()))
    return {"codes": model[0].weight.qdata, "scale": model[0].weight.scale.flatten(), "y": model(inputs())}


@snippet("0.12", approx=Y)
def int8_by_the_older_function() -> dict[str, Any]:
    from torchao.quantization import int8_weight_only, quantize_

    model = mlp()
    quantize_(model, int8_weight_only())
    codes, scale, _zero = model[0].weight.tensor_impl.get_plain()
    return {"codes": codes, "scale": scale.flatten(), "values": model[0].weight.dequantize(), "y": model(inputs())}


@snippet("0.12", approx=Y)
def int8_group_size() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Int8WeightOnlyConfig(group_size=32))
    codes, scale, _zero = model[0].weight.tensor_impl.get_plain()
    return {"codes": codes, "scale": scale.flatten(), "y": model(inputs())}


@snippet(approx=Y)
def int8_leaves_the_bias_alone() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = mlp()
    bias = model[0].bias
    quantize_(model, Int8WeightOnlyConfig())
    return {
        "same": model[0].bias is bias,
        "class": type(model[0]).__name__,
        "grad": model[0].weight.requires_grad,
        "parameter": isinstance(model[0].weight, nn.Parameter),
        "y": model[0](inputs()),
    }


@snippet()
def int4_plain_needs_a_gpu_there() -> dict[str, Any]:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model, x = mlp(torch.bfloat16), inputs(dtype=torch.bfloat16)
    y = model(x)
    quantize_(model, Int4WeightOnlyConfig(group_size=32))
    assert sqnr(y, model(x)) > 15
    return {"shape": model[0].weight.shape}


@snippet("0.12", approx={"y": 2e-2, "values": 8e-3})  # read back by a bfloat16 product there
def int4_in_the_cpu_layout() -> dict[str, Any]:
    from torchao.dtypes import Int4CPULayout
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = mlp(torch.bfloat16)
    quantize_(model, Int4WeightOnlyConfig(group_size=32, layout=Int4CPULayout()))
    return {"values": model[0].weight.dequantize(), "y": model(inputs(dtype=torch.bfloat16))}


@snippet("0.12", approx={"y": 2e-2})
def int4_with_integer_zero_points() -> dict[str, Any]:
    from torchao.dtypes import PlainLayout
    from torchao.quantization import Int4WeightOnlyConfig, quantize_
    from torchao.quantization.quant_primitives import ZeroPointDomain

    model = mlp(torch.bfloat16)
    quantize_(
        model,
        Int4WeightOnlyConfig(
            group_size=32, layout=PlainLayout(), zero_point_domain=ZeroPointDomain.INT, preserve_zero=True
        ),
    )
    codes, _scale, _zero = model[0].weight.tensor_impl.get_plain()
    return {
        "codes": codes.to(torch.int32),
        "values": model[0].weight.dequantize(),
        "y": model(inputs(dtype=torch.bfloat16)),
    }


def _intx(dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(32), **more))
    w = model[0].weight
    return {"codes": w.qdata, "scale": w.scale, "values": w.dequantize(), "y": model(inputs())}


@snippet(approx=Y)
def int1_in_groups() -> dict[str, Any]:
    return _intx(torch.int1)


@snippet(approx=Y)
def int2_in_groups() -> dict[str, Any]:
    return _intx(torch.int2)


@snippet(approx=Y)
def int3_in_groups() -> dict[str, Any]:
    return _intx(torch.int3)


@snippet(approx=Y)
def int4_in_groups() -> dict[str, Any]:
    return _intx(torch.int4)


@snippet(approx=Y)
def int5_in_groups() -> dict[str, Any]:
    return _intx(torch.int5)


@snippet(approx=Y)
def int7_in_groups() -> dict[str, Any]:
    return _intx(torch.int7)


@snippet(approx=Y)
def int4_asymmetric() -> dict[str, Any]:
    from torchao.quantization import MappingType

    return _intx(torch.int4, mapping_type=MappingType.ASYMMETRIC)


@snippet(approx=Y)
def int4_no_clipping() -> dict[str, Any]:
    from torchao.quantization import MappingType

    return _intx(torch.int4, mapping_type=MappingType.SYMMETRIC_NO_CLIPPING_ERR)


@snippet(approx={"y": 1e-5})
def int4_bfloat16_scales() -> dict[str, Any]:
    return _intx(torch.int4, scale_dtype=torch.bfloat16)


@snippet(differs={"symmetric": "None where every zero point is zero"})
def intx_zero_points() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    model = mlp()
    config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
    quantize_(model[0], config)
    config.mapping_type = MappingType.ASYMMETRIC
    quantize_(model[2], config)
    return {"symmetric": model[0].weight.zero_point, "asymmetric": model[2].weight.zero_point}


@snippet(approx=Y)
def intx_per_axis() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, quantize_

    model = mlp()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=PerAxis(0)))
    w = model[0].weight
    return {"codes": w.qdata, "scale": w.scale, "target": w.target_dtype, "y": model(inputs())}


@snippet()
def intx_of_an_embedding() -> dict[str, Any]:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    model = filled(nn.Sequential(nn.Embedding(20, 64)))
    quantize_(
        model,
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
        filter_fn=lambda module, name: isinstance(module, nn.Embedding),
    )
    return {"y": model(torch.tensor([[0, 3], [19, 3]])), "codes": model[0].weight.qdata}


@snippet("0.12", approx=Y)
def intx_q_dq_layout() -> dict[str, Any]:
    from torchao.dtypes import QDQLayout
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    model = mlp()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), layout=QDQLayout()))
    return {"values": model[0].weight.dequantize(), "y": model(inputs())}


@snippet("0.12", approx=Y)
def unsigned_codes_in_groups() -> dict[str, Any]:
    from torchao.quantization import UIntXWeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, UIntXWeightOnlyConfig(torch.uint4, group_size=32))
    return {"values": model[0].weight.dequantize(), "y": model(inputs())}


@snippet("0.12", approx=Y)
def unsigned_two_bits() -> dict[str, Any]:
    from torchao.quantization import quantize_, uintx_weight_only

    model = mlp()
    quantize_(model, uintx_weight_only(torch.uint2, 32))
    return {"values": model[0].weight.dequantize(), "y": model(inputs())}


@snippet(approx=Y)
def float8_per_row() -> dict[str, Any]:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Float8WeightOnlyConfig())
    w = model[0].weight
    return {"codes": w.qdata.view(torch.uint8), "scale": w.scale, "values": w.dequantize(), "y": model(inputs())}


@snippet(approx=Y)
def float8_e5m2() -> dict[str, Any]:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = mlp()
    quantize_(model, Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2))
    return {
        "codes": model[0].weight.qdata.view(torch.uint8),
        "values": model[0].weight.dequantize(),
        "y": model(inputs()),
    }


@snippet("0.12", approx=Y)
def float8_older() -> dict[str, Any]:
    from torchao.quantization import float8_weight_only, quantize_

    model = mlp()
    quantize_(model, float8_weight_only())
    return {"values": model[0].weight.dequantize(), "y": model(inputs())}


@snippet()
def int8_of_a_single_layer_by_device() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = filled(nn.Linear(64, 8)).to(torch.float32)
    quantize_(model, Int8WeightOnlyConfig(), device="cpu")
    return {"codes": model.weight.qdata, "device": str(model.weight.device)}


@snippet(approx=Y)
def odd_widths() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(filled(nn.Linear(37, 11)))
    quantize_(model, Int8WeightOnlyConfig())
    return {"codes": model[0].weight.qdata, "y": model(normal(3, 37, seed=5))}
