"""Write tests/golden/native/v5: a file of format version 5 that every later version must read.

    PYTHONPATH=. python tests/golden/native/make_v5.py

As for make_v1.py: written once. It holds what earlier versions cannot say: factors of the contracted axis.
"""

from pathlib import Path

import torch

from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import NF4_DOUBLE, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from tests.golden.native.make_v1 import STATIC, quantized, weight
from tests.golden.native.make_v2 import reordered, write


def scaled(w: QT) -> QT:
    """The tensor with a factor for each channel, from 1/4 on, and one that is 0."""
    factors = torch.arange(w.stored_shape[-1], dtype=torch.float32) / 8 + 0.25
    factors[3] = 0
    return w.with_(pre_scale=factors)


def cases() -> dict[str, torch.Tensor]:
    scale, zero = torch.tensor([0.75]), torch.tensor([-5], dtype=torch.int8)
    out: dict[str, torch.Tensor] = {
        "plain": weight(3, 2),
        "bare": quantized(QuantSpec(INT8, (-1,)), 4, 24),
        "int8": scaled(quantized(QuantSpec(INT8, (-1,)), 4, 24)),
        "int4": scaled(quantized(QuantSpec(INT4, (16,), scale=torch.bfloat16), 3, 50, dtype=torch.float16)),
        "nested": scaled(quantized(NF4_DOUBLE, 4, 128)),
        "reordered": scaled(reordered(quantized(QuantSpec(INT4, (8,)), 5, 32))),
        "turned": scaled(quantized(QuantSpec(INT4, (8,)), 6, 16)).t(),
        "act.static": scaled(quantized(QuantSpec(INT8, (-1,)), 2, 32)).with_(
            act=STATIC, act_scale=scale, act_zero_point=zero
        ),
    }
    return {**out, "tied": out["int4"]}


if __name__ == "__main__":
    write(Path(__file__).parent / "v5", cases())
