"""Write golden values of torchao's dtypes: torchao_dtypes_0.18.safetensors and torchao_dtypes_0.18.json.

Run it with a python that has torchao 0.18; pennyweight is neither needed nor imported:

    python -m venv oracle && oracle/bin/pip install torch==2.13.0 numpy safetensors==0.8.0
    oracle/bin/pip install --no-deps torchao==0.18.0
    oracle/bin/python tests/golden/make_torchao_dtypes.py
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

OUT = Path(__file__).with_name("torchao_dtypes_0.18.safetensors")
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


def main() -> None:
    tensors, cases = {}, []
    for tag, dtype in DTYPES.items():
        for kind, (shape, block, scaler_block, whole) in NF4.items():
            g = torch.Generator().manual_seed(len(cases))
            x = torch.randn(shape, generator=g).to(dtype)
            w, name = to_nf4(x, block, scaler_block), f"{kind}_{tag}"
            held = {"weight": x, "original": w.get_original_weight()}
            for part in ("quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4"):
                held[part] = getattr(w, part)
            tensors |= {f"nf4.{name}.{part}": t.contiguous() for part, t in held.items()}
            cases.append({"name": name, "block_size": block, "scaler_block_size": scaler_block, "whole": whole})
    save_file(tensors, OUT)
    OUT.with_suffix(".json").write_text(json.dumps({"nf4": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
