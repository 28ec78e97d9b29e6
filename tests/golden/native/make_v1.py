"""Write tests/golden/native/v1: files of format version 1 that every later version must read.

    python tests/golden/native/make_v1.py

They are written once. Never write them again for a new release: what matters is that old files stay readable.
``expected.safetensors`` holds, under each tensor's name, the float32 values that it must dequantize to. Weights are
small sums of fractions, not random numbers, so that the script gives the same files everywhere.
"""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from pennyweight.core.formats import E4M3, INT4, INT8, TERNARY, UDYNAMIC8, UINT3, UINT4
from pennyweight.core.spec import MXFP4, MXFP8, NF4_DOUBLE, NVFP4, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import save

FOLDER = Path(__file__).parent / "v1"
STATIC = ActivationSpec(QuantSpec(INT8, None, scale=torch.bfloat16, zero_point=True), "static")
DYNAMIC = ActivationSpec(QuantSpec(E4M3, (-1,)), "dynamic", "symmetric", 2.0**-40)


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in about [-1, 1] with no pattern along any block."""
    n = torch.Size(shape).numel()
    steps = (torch.arange(n) * 7919 + 13) % 1021
    return (steps.double() / 510 - 1).to(dtype).reshape(shape)


def quantized(spec: QuantSpec, *shape: int, dtype: torch.dtype = torch.float32) -> QT:
    return QT.from_float(weight(*shape, dtype=dtype), spec)


def cases() -> dict[str, Tensor]:
    """One tensor for every thing that the format can say."""
    conv = quantized(QuantSpec(INT8, (-1, -1)), 3, 4, 5)
    out = {
        "plain.float": weight(3, 2),
        "plain.bfloat16": weight(3, 2).bfloat16(),
        "plain.steps": torch.tensor(5),
        "plain.mask": torch.tensor([True, False, True]),
        "plain.empty": torch.zeros(0, 4),
        "int8": quantized(QuantSpec(INT8, (-1,)), 4, 20, dtype=torch.bfloat16),
        "int4.padded": quantized(QuantSpec(INT4, (16,), scale=torch.bfloat16), 3, 50, dtype=torch.float16),
        "uint4.zero_point": quantized(QuantSpec(UINT4, (8,), zero_point=True), 4, 24),
        "uint3.zero_point": quantized(QuantSpec(UINT3, (2, 9), scale=torch.float16, zero_point=True), 5, 27),
        "ternary.tensor": quantized(QuantSpec(TERNARY, None), 3, 10),
        "tinygemm.offset": quantized(TINYGEMM.with_(block=(32,)), 4, 64, dtype=torch.bfloat16),
        "fp8.square": quantized(QuantSpec(E4M3, (4, 8)), 8, 16),
        "mxfp8.nested": quantized(MXFP8, 2, 64),
        "mxfp4.nested": quantized(MXFP4, 2, 40),
        "nvfp4.nested": quantized(NVFP4, 3, 32),
        "nf4.nested_offset": quantized(NF4_DOUBLE, 4, 128),
        "dynamic8": quantized(QuantSpec(UDYNAMIC8, (16,)), 2, 20),
        "axes.turned": quantized(QuantSpec(INT4, (8,)), 6, 16).t(),
        "axes.permuted": conv.permute(2, 0, 1),
        "act.dynamic": quantized(QuantSpec(E4M3, (-1,)), 4, 16).with_(act=DYNAMIC),
    }
    scale, zero = torch.tensor([0.75]), torch.tensor([-5], dtype=torch.int8)
    out["act.static"] = out["int8"].with_(act=STATIC, act_scale=scale, act_zero_point=zero)
    signed = quantized(QuantSpec(UINT4, (8,), mid=8), 2, 16)
    out["signed_scale"] = signed.with_(scale=signed.scale * torch.tensor([1.0, -1.0]))
    out["tied"] = out["int4.padded"]
    out["plain.tied"] = out["plain.float"]
    return out


def main() -> None:
    state = cases()
    save(state, FOLDER / "all.safetensors", metadata={"note": "a string of the writer's"})
    save(state, FOLDER / "sharded", max_shard_bytes=600)
    expected = {k: v.dequantize(torch.float32) if isinstance(v, QT) else v for k, v in state.items()}
    safetensors.torch.save_file(
        {k: v.clone().contiguous() for k, v in expected.items()}, FOLDER / "expected.safetensors"
    )


if __name__ == "__main__":
    main()
