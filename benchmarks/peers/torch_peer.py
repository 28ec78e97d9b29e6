"""What torch itself offers: float products, and its own int8 and int4 operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Bind, Competitor, eager, rolled

FAMILY = "torch"


def versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def _float(dtype: torch.dtype):
    def make(weight: Tensor, copies: int) -> Bind:
        ws = [rolled(weight, i).to(dtype) for i in range(copies)]
        return eager([lambda x, w=w: F.linear(x, w) for w in ws], dtype, 1)

    return make


def _mkldnn(weight: Tensor, copies: int) -> Bind:
    """bf16 packed in advance by oneDNN, as a frozen compiled model has it; packed for each M."""
    ws = [rolled(weight, i) for i in range(copies)]
    run = torch.ops.mkldnn._linear_pointwise

    def bind(x: Tensor):
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, x.shape[0]) for w in ws]
        products = [lambda x, w=w: run(x, w, None, "none", [], "") for w in packed]
        return eager(products, torch.bfloat16, 1)(x)

    return bind


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [N, K] and scales float32 [N], symmetric."""
    w = weight.float()
    scale = w.abs().amax(1) / 127
    return (w / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def _int_mm(weight: Tensor, copies: int) -> Bind:
    """Both int8: tokens quantized by plain operators, `torch._int_mm`, scales multiplied on."""
    codes, scale = _int8(weight)

    def product(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        step = x.abs().amax(1, keepdim=True).float() / 127
        q = (x / step).round().to(torch.int8)
        return (torch._int_mm(q, w).float() * step * s).to(x.dtype)

    ws = [(rolled(codes, i).t(), rolled(scale, i)) for i in range(copies)]
    return eager([lambda x, w=w, s=s: product(x, w, s) for w, s in ws], torch.bfloat16, 1)


def _int8pack(weight: Tensor, copies: int) -> Bind:
    codes, scale = _int8(weight)
    ws = [(rolled(codes, i), rolled(scale, i).bfloat16()) for i in range(copies)]
    return eager([lambda x, w=w, s=s: torch._weight_int8pack_mm(x, w, s) for w, s in ws], torch.bfloat16, 1)


def int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 int32 [N, K], and scale and least value of each group, float32 [N, K/group]."""
    w = weight.float().unflatten(1, (-1, group))
    low, high = w.aminmax(dim=2)
    scale = (high - low).clamp(min=1e-6) / 15
    return ((w - low[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1).int(), scale, low


def _int4pack(group: int):
    def make(weight: Tensor, copies: int) -> Bind:
        codes, scale, low = int4(weight, group)
        params = torch.stack([scale, low + 8 * scale], 2).bfloat16()
        ws = [
            (
                torch.ops.aten._convert_weight_to_int4pack_for_cpu(rolled(codes, i), 1),
                rolled(params, i).transpose(0, 1).contiguous(),
            )
            for i in range(copies)
        ]
        run = torch.ops.aten._weight_int4pack_mm_for_cpu
        return eager([lambda x, w=w, p=p: run(x, w, group, p) for w, p in ws], torch.bfloat16, 1)

    return make


def _dynamic(engine: str):
    """`torch.ao.quantization.quantize_dynamic`'s operator: float32 in and out, one scale for the whole input."""

    def make(weight: Tensor, copies: int) -> Bind:
        w, packed = weight.float(), []
        scale = w.abs().amax(1) / 127
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        torch.backends.quantized.engine = engine
        for i in range(copies):
            q = torch.quantize_per_channel(rolled(w, i), rolled(scale, i).double(), zeros, 0, torch.qint8)
            packed.append(torch.ops.quantized.linear_prepack(q, None))
        run = torch.ops.quantized.linear_dynamic
        return eager([lambda x, p=p: run(x, p, engine == "fbgemm") for p in packed], torch.float32, 1)

    return make


def _engine(name: str):
    return lambda n, k, m: name in torch.backends.quantized.supported_engines or f"torch has no {name} here"


def competitors(threads: int) -> list[Competitor]:
    return [
        Competitor("torch bf16 F.linear", FAMILY, 16, 16, "bf16", 0.006, _float(torch.bfloat16)),
        Competitor(
            "torch bf16 mkldnn prepacked", FAMILY, 16, 16, "bf16", 0.006, _mkldnn,
            lambda n, k, m: torch.backends.mkldnn.is_available() or "torch has no oneDNN here",
        ),
        Competitor("torch fp32 F.linear", FAMILY, 32, 32, "fp32", 1e-5, _float(torch.float32)),
        Competitor(
            "torch _int_mm W8A8", FAMILY, 8, 8, "int8", 0.017, _int_mm, detail="per token, plain operators around it"
        ),
        Competitor("torch _weight_int8pack_mm", FAMILY, 8, 8, "bf16", 0.012, _int8pack),
        Competitor("torch _weight_int4pack_mm_for_cpu g32", FAMILY, 4, 5, "bf16", 0.09, _int4pack(32)),
        Competitor("torch _weight_int4pack_mm_for_cpu g128", FAMILY, 4, 4.25, "bf16", 0.115, _int4pack(128)),
        Competitor(
            "torch quantize_dynamic fbgemm", FAMILY, 8, 8, "int8", 0.025, _dynamic("fbgemm"), _engine("fbgemm"),
            detail="float32 in and out, per tensor, 7 bits of activation",
        ),
        Competitor(
            "torch quantize_dynamic onednn", FAMILY, 8, 8, "int8", 0.02, _dynamic("onednn"), _engine("onednn"),
            detail="float32 in and out, per tensor",
        ),
    ]  # fmt: skip
