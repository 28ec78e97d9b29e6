"""Write torchao_0.18_states.safetensors: weights of each class that torchao saves, in its own safetensors form.

    python make_torchao_states.py       # in an environment with torchao 0.18.0; CPU

The file is what ``flatten_tensor_state_dict`` makes of ``<name>.weight``; beside it ``<name>.value`` is dequantized.
"""

from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerBlock,
    PerGroup,
    PerTensor,
    quantize_,
)

assert version("torchao") == "0.18.0"
CONFIGS = {
    "int8_row": Int8WeightOnlyConfig(),
    "int8_group": Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8_tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8_dynamic": Int8DynamicActivationInt8WeightConfig(),
    "int8_dynamic_asymmetric": Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC),
    "int8_reduced": Int8DynamicActivationInt8WeightConfig(reduce_range=True),
    "int4": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "int3_asymmetric": IntxWeightOnlyConfig(torch.int3, PerGroup(16), MappingType.ASYMMETRIC),
    "int5_dynamic": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int5),
    "float8_row": Float8WeightOnlyConfig(),
    "float8_e5m2": Float8WeightOnlyConfig(torch.float8_e5m2),
    "float8_tensor": Float8WeightOnlyConfig(granularity=PerTensor()),
}


def main():
    out, values = {}, {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        layer = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        quantize_(layer, config)
        out[f"{name}.weight"] = layer.weight.detach()
    torch.manual_seed(0)
    w = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16).weight.detach()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2):
        out[f"mx_{str(dtype).removeprefix('torch.')}.weight"] = MXTensor.to_mx(w, dtype, 32)
    out["float8_block.weight"] = Float8Tensor.from_hp(w, granularity=PerBlock([16, 32]))
    out["mx_swizzled.weight"] = MXTensor.to_mx(w, torch.float8_e4m3fn, 32, is_swizzled_scales=True)
    out["nvfp4.weight"] = NVFP4Tensor.to_nvfp4(w)
    scale = per_tensor_amax_to_scale(w.abs().max())
    out["nvfp4_two.weight"] = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale)
    for name, t in out.items():
        values[name.replace(".weight", ".value")] = t.dequantize()
    tensors, metadata = flatten_tensor_state_dict({**out, **values})
    save_file(tensors, Path(__file__).parent / "torchao_0.18_states.safetensors", metadata | {"torchao": "0.18.0"})


if __name__ == "__main__":
    with torch.no_grad():
        main()
