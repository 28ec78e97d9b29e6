"""Write golden values of torchao's dtypes: torchao_dtypes_<version>.safetensors and torchao_dtypes_<version>.json.

0.18: NF4. 0.9: packings that later releases dropped. Run it with a python that has the release; pennyweight is neither
needed nor imported:

    python -m venv oracle && oracle/bin/pip install torch==2.13.0 numpy safetensors==0.8.0
    oracle/bin/pip install --no-deps torchao==0.18.0         # then 0.9.0
    oracle/bin/python tests/golden/make_torchao_dtypes.py
"""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VERSION = ".".join(importlib.metadata.version("torchao").split(".")[:2])
OUT = Path(__file__).with_name(f"torchao_dtypes_{VERSION}.safetensors")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Name: shape, block size, scaler block size, whether our blocks are as large as torchao's.
NF4 = {
    "rows": ((16, 256), 64, 32, True),  # eight rows share a factor
    "row": ((4, 512), 32, 8, True),
    "flat": ((256,), 32, 4, True),
    "wide": ((16, 32), 64, 4, True),  # two rows share a scaler
    "ragged": ((8, 352), 32, 8, False),  # rows of eleven scalers
    "cut": ((8, 96), 64, 4, False),  # blocks that cross rows
}


def nf4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    tensors, cases = {}, []
    for tag, dtype in DTYPES.items():
        for kind, (shape, block, scaler_block, whole) in NF4.items():
            g = torch.Generator().manual_seed(len(cases))
            x = torch.randn(shape, generator=g).to(dtype)
            w, name = to_nf4(x, block, scaler_block), f"{kind}_{tag}"
            held = {"weight": x, "original": w.get_original_weight()}
            for part in ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4"):
                held[part] = getattr(w, part)
            tensors |= {f"nf4.{name}.{part}": t for part, t in held.items()}
            cases.append({"name": name, "block_size": block, "scaler_block_size": scaler_block, "whole": whole})
    return tensors, {"nf4": cases}


def packings() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from torchao.dtypes.floatx import floatx_tensor_core_layout as floatx
    from torchao.prototype.dtypes import uintgen
    from torchao.quantization.marlin_qqq import pack_to_marlin_qqq

    g, tensors = torch.Generator().manual_seed(0), {}
    cases = {"floatx": [(2, 0), (2, 1), (2, 2), (3, 2), (3, 3)], "marlin_qqq": [128, 256]}
    for ebits, mbits in cases["floatx"]:
        bits = 1 + ebits + mbits
        codes = torch.randint(0, 1 << bits, (64, 64), dtype=torch.uint8, generator=g)
        x = torch.randn(64, 64, generator=g).half()
        packed, scale = floatx.to_scaled_tc_floatx(x, ebits, mbits)
        tensors |= {
            f"floatx.{ebits}_{mbits}.{name}": t
            for name, t in {
                "codes": codes, "packed": floatx.pack_tc_floatx(codes, bits), "weight": x, "packed_weight": packed,
                "scale": scale,
            }.items()
        }  # fmt: skip
    for bits in range(2, 8):
        codes = torch.randint(0, 1 << bits, (64,), dtype=torch.uint8, generator=g)
        packed = getattr(uintgen, f"pack_uint{bits}")(codes)
        tensors |= {f"uintgen.{bits}.codes": codes, f"uintgen.{bits}.packed": packed}
    for group in cases["marlin_qqq"]:
        least = 0 if group < 256 else -7
        codes = torch.randint(least, least + 15, (256, 64), dtype=torch.int32, generator=g)
        s_group = torch.rand(256 // group if group < 256 else 0, 64, generator=g).half()
        s_channel = torch.rand(1, 64, generator=g)
        given = (codes, s_group, s_channel)
        tensors[f"marlin_qqq.{group}.codes"] = codes.to(torch.int8)
        names = ("s_group", "s_channel", "packed", "packed_group", "packed_channel")
        held = (*given[1:], *pack_to_marlin_qqq(*given, 4, group))
        tensors |= {f"marlin_qqq.{group}.{name}": t for name, t in zip(names, held, strict=True)}
    return tensors, cases


def main() -> None:
    tensors, cases = nf4() if VERSION == "0.18" else packings()
    save_file({name: t.contiguous() for name, t in tensors.items()}, OUT)
    OUT.with_suffix(".json").write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
