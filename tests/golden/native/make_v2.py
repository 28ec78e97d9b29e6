"""Write tests/golden/native/v2: a file of format version 2 that every later version must read.

    PYTHONPATH=. python tests/golden/native/make_v2.py

As for make_v1.py: written once. It holds what version 1 cannot say, tensors whose contracted axis is stored in another
order, beside one that it can.
"""

from pathlib import Path

import safetensors.torch
import torch

from pennyweight.core.formats import INT4, UINT3
from pennyweight.core.spec import NF4_DOUBLE, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import save
from tests.golden.native.make_v1 import STATIC, quantized, weight


def reordered(w: QT) -> QT:
    """The tensor whose channels lie as those of w do, in an order with no pattern along any block."""
    n = w.stored_shape[-1]
    return w.with_(perm=((torch.arange(n) * 7 + 3) % n).to(torch.int32))


def cases() -> dict[str, torch.Tensor]:
    group = QuantSpec(INT4, (16,), scale=torch.bfloat16)
    out: dict[str, torch.Tensor] = {
        "plain": weight(3, 2),
        "in_order": quantized(group, 3, 50),
        "int4": reordered(quantized(group, 3, 50, dtype=torch.float16)),
        "uint3.zero_point": reordered(quantized(QuantSpec(UINT3, (8,), torch.float16, True), 5, 32)),
        "nf4.nested": reordered(quantized(NF4_DOUBLE, 4, 128)),
        "turned": reordered(quantized(QuantSpec(INT4, (8,)), 6, 16)).t(),
        "experts": reordered(quantized(QuantSpec(INT4, (8,)), 2, 3, 16)).transpose(1, 2),
    }
    scale, zero = torch.tensor([0.75]), torch.tensor([-5], dtype=torch.int8)
    out["act.static"] = reordered(quantized(group, 2, 32)).with_(act=STATIC, act_scale=scale, act_zero_point=zero)
    out["tied"] = out["int4"]
    return out


def write(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """The file, and beside it the values it stands for."""
    folder.mkdir(exist_ok=True)
    save(state, folder / "all.safetensors")
    expected = {k: v.dequantize(torch.float32) if isinstance(v, QT) else v for k, v in state.items()}
    safetensors.torch.save_file(
        {k: v.clone().contiguous() for k, v in expected.items()}, folder / "expected.safetensors"
    )


if __name__ == "__main__":
    write(Path(__file__).parent / "v2", cases())
