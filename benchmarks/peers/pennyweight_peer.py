"""Pennyweight through its public interface: nn.Linear in bfloat16, `quantize_`, a call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels import get_kernel
from pennyweight.kernels.repack import prepare

from .base import Competitor, eager

FAMILY = "pennyweight"
_INT4, _SYMMETRIC = pw.Int8DynamicActivationIntxWeightConfig, pw.MappingType.SYMMETRIC

CONFIGS: tuple[tuple[str, pw.AOBaseConfig, int, float, str, float], ...] = (
    ("int8-dynamic", pw.Int8DynamicActivationInt8WeightConfig(), 8, 8, "int8", 0.017),
    ("int8 weight-only", pw.Int8WeightOnlyConfig(), 8, 8, "bf16", 0.012),
    ("int4 g32", pw.Int4WeightOnlyConfig(group_size=32), 4, 5, "bf16", 0.09),
    ("int4 g128", pw.Int4WeightOnlyConfig(group_size=128), 4, 4.25, "bf16", 0.115),
    ("int8-dynamic-int4 g32", _INT4(torch.int4, pw.PerGroup(32)), 4, 4.5, "int8", 0.11),
    ("int8-dynamic-int4 g128", _INT4(torch.int4, pw.PerGroup(128)), 4, 4.125, "int8", 0.13),
    ("int8-symmetric-int4 g32", _INT4(torch.int4, pw.PerGroup(32), act_mapping_type=_SYMMETRIC), 4, 4.5, "int8", 0.11),
    (
        "int8-symmetric-int4 g128",
        _INT4(torch.int4, pw.PerGroup(128), act_mapping_type=_SYMMETRIC),
        4,
        4.125,
        "int8",
        0.13,
    ),
    ("nf4", pw.NF4WeightOnlyConfig(), 4, 4.13, "bf16", 0.11),
    ("float8 weight-only", pw.Float8WeightOnlyConfig(), 8, 8, "bf16", 0.035),
)
# As GGUF files hold them: spec, bits, stored bits, bound. Beside each the row that dequantizes the weight at each call.
GGUF = (("q4_k", 4, 4.63, 0.09), ("q6_k", 6, 6.57, 0.03))
ALONE = ("nf4", "float8 weight-only")  # formats that no peer computes with on a CPU


def versions() -> dict[str, str]:
    return {"pennyweight": pw.__version__}


def _make(config: pw.AOBaseConfig):
    def layer(weight: Tensor) -> nn.Module:
        n, k = weight.shape
        linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        model = nn.Sequential(linear)
        pw.quantize_(model, config)
        return model[0]

    # Each copy is quantized for itself, so that its memory is what a model has. Equal in content: nothing here looks.
    return lambda weight, copies: eager([layer(weight) for _ in range(copies)], torch.bfloat16)


def _gguf(spec: str, dequantize: bool):
    def product(weight: Tensor):
        w = AffineQuantizedTensor.from_float(weight, SPECS[spec])
        if dequantize:
            w, run = w.to_layout("bits"), get_kernel("linear", "dequantize").run
            return lambda x: run(x, w, None)
        w = prepare(w)
        return lambda x: nn.functional.linear(x, w)

    return lambda weight, copies: eager([product(weight) for _ in range(copies)], torch.bfloat16)


def competitors(threads: int) -> list[Competitor]:
    return [
        Competitor(
            f"pennyweight {name}",
            FAMILY,
            bits,
            stored,
            arithmetic,
            bound,
            _make(config),
            detail=str(config),
            alone=name in ALONE,
        )
        for name, config, bits, stored, arithmetic, bound in CONFIGS
    ] + [
        Competitor(
            f"pennyweight {spec}{', dequantized' if slow else ''}", FAMILY, bits, stored, "bf16", bound,
            _gguf(spec, slow), detail=str(SPECS[spec]), alone=True,
        )
        for spec, bits, stored, bound in GGUF
        for slow in (False, True)
    ]  # fmt: skip
