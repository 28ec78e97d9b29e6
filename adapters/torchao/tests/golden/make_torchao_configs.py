"""Write the JSON that torchao makes of configs: torchao_configs_<version>.json.

Run it with a python that has the oracle installed, once with torchao==0.18.0 and once with torchao==0.12.0:

    python -m venv oracle && oracle/bin/pip install torch==2.13.0 && oracle/bin/pip install --no-deps torchao==0.12.0
    oracle/bin/python tests/golden/make_torchao_configs.py            # writes next to this file

``cases`` has the JSON by the call that makes the config. A release has the calls it understands.
"""

import importlib.metadata
import json
import sys
import types
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
VERSION = importlib.metadata.version("torchao").split("+")[0]
if VERSION.startswith("0.12."):  # its lowering for inductor does not import under torch 2.13, and is not needed here
    stub = types.ModuleType("torchao.prototype.inductor.int8_sdpa_lowering")
    stub.register_int8_sdpa = lambda: None
    sys.modules[stub.__name__] = stub

import torch  # noqa: E402
from torchao import quantization  # noqa: E402
from torchao.core.config import config_to_dict  # noqa: E402
from torchao.prototype import awq, mx_formats  # noqa: E402
from torchao.prototype.mx_formats import config as mx_config  # noqa: E402
from torchao.quantization import quant_api  # noqa: E402
from torchao.sparsity import sparse_api  # noqa: E402

CALLS = """
Int8WeightOnlyConfig()
Int8WeightOnlyConfig(group_size=32)
Int8WeightOnlyConfig(granularity=PerGroup(32))
Int8WeightOnlyConfig(granularity=PerTensor())
Int8DynamicActivationInt8WeightConfig()
Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC)
Int8DynamicActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()], reduce_range=True)
Int4WeightOnlyConfig()
Int4WeightOnlyConfig(group_size=32)
Int4WeightOnlyConfig(group_size=32, use_hqq=True)
Int4WeightOnlyConfig(group_size=32, int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D)
Int4WeightOnlyConfig(group_size=64, int4_packing_format="preshuffled")
IntxWeightOnlyConfig()
IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), mapping_type=MappingType.ASYMMETRIC)
IntxWeightOnlyConfig(weight_dtype=torch.int2, scale_dtype=torch.bfloat16)
Int8DynamicActivationIntxWeightConfig()
Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerAxis(0))
Int8DynamicActivationIntxWeightConfig(intx_packing_format=IntxPackingFormat.OPAQUE_TORCHAO_AUTO)
Int8DynamicActivationInt4WeightConfig()
Int8DynamicActivationInt4WeightConfig(group_size=64, mapping_type=MappingType.ASYMMETRIC)
Float8WeightOnlyConfig()
Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2)
Float8WeightOnlyConfig(granularity=PerTensor())
Float8DynamicActivationFloat8WeightConfig()
Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
Float8DynamicActivationFloat8WeightConfig(granularity=[PerRow(), PerRow()])
Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])])
Float8DynamicActivationFloat8WeightConfig(mm_config=Float8MMConfig(emulate=True))
Float8DynamicActivationFloat8WeightConfig(kernel_preference=KernelPreference.TORCH)
Float8DynamicActivationInt4WeightConfig()
UIntXWeightOnlyConfig(torch.uint4)
UIntXWeightOnlyConfig(dtype=torch.uint3, group_size=32)
FPXWeightOnlyConfig(3, 2)
MXDynamicActivationMXWeightConfig()
MXDynamicActivationMXWeightConfig(32, torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2)
MXDynamicActivationMXWeightConfig(scaling_mode=ScaleCalculationMode.FLOOR)
NVFP4WeightOnlyConfig()
NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False)
ModuleFqnToConfig()
ModuleFqnToConfig({"a": Int8WeightOnlyConfig(), "_default": Int4WeightOnlyConfig(group_size=32), "b": None})
FqnToConfig({"re:layers.*": Int8WeightOnlyConfig(), "layers.0.weight": None})
BlockSparseWeightConfig(blocksize=64)
FbgemmConfig(torch.bfloat16, torch.int4, torch.bfloat16, [1, 1, 256])
GemliteUIntXWeightOnlyConfig()
Int8DynamicActivationInt8WeightConfig(layout=SemiSparseLayout())
"""


def main() -> None:
    names = {"torch": torch}
    for module in (quantization, quant_api, mx_formats, mx_config, awq, sparse_api):
        names.update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    cases = {}
    for call in CALLS.strip().splitlines():
        try:
            cases[call] = config_to_dict(eval(call, dict(names)))
        except (AssertionError, NameError, TypeError) as error:  # another release's
            print(f"{call}: {type(error).__name__}: {' '.join(str(error).split())}")
    head = {"torchao": VERSION, "torch": torch.__version__.split("+")[0]}
    lines = (f"  {json.dumps(call)}: {json.dumps(case, separators=(',', ':'))}" for call, case in cases.items())
    text = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path = Path(__file__).with_name(f"torchao_configs_{'.'.join(VERSION.split('.')[:2])}.json")
    path.write_text("{\n" + text + ' "cases": {\n' + ",\n".join(lines) + "\n }\n}\n")
    print(f"{len(cases)} cases in {path.name}")


if __name__ == "__main__":
    main()
