"""What ``explain`` says for devices that this machine lacks, against golden_explain.txt.

After a change of rows, PENNYWEIGHT_WRITE_GOLDEN=1 pytest tests/kernels/test_explain_targets.py; read the difference.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.kernels import torch_gpu

GOLDEN = Path(__file__).parent / "golden_explain.txt"
TARGETS = ("cuda:sm_80", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "hip:gfx942", "mps")
ROWS = pw.PerRow()
CONFIGS: dict[str, Any] = {
    "int4": "int4",
    "int4, groups of 32": pw.Int4WeightOnlyConfig(group_size=32),
    "int8": "int8",
    "int8-dynamic": "int8-dynamic",
    "float8": "float8",
    "float8-dynamic, per tensor": pw.Float8DynamicActivationFloat8WeightConfig(),
    "float8-dynamic, per row": pw.Float8DynamicActivationFloat8WeightConfig(granularity=ROWS),
    "mxfp8-dynamic": pw.MXDynamicActivationMXWeightConfig(),
    "nvfp4-dynamic": pw.NVFP4DynamicActivationNVFP4WeightConfig(),
    "nf4": "nf4",
}


def told() -> str:
    parts = []
    for name, config in CONFIGS.items():
        layer = nn.Sequential(nn.Linear(256, 512, bias=False, dtype=torch.bfloat16))
        pw.quantize_(layer, config)
        for target in TARGETS:
            parts.append(f"== {name} on {target}\n{pw.explain(torch.bfloat16, layer[0].weight, device=target)}\n")
    return "\n".join(parts)


def test_what_is_said_of_six_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_gpu, "_TORCH", (2, 13))  # one row says more with an older one
    monkeypatch.setenv("PENNYWEIGHT_GPU", "1")  # a card of this machine is not asked for proof
    text = told()
    if os.environ.get("PENNYWEIGHT_WRITE_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_target_has_a_kernel_for_every_config() -> None:
    """At least the reference, which says that it dequantizes."""
    sections = GOLDEN.read_text(encoding="utf-8").split("== ")[1:]
    assert len(sections) == len(CONFIGS) * len(TARGETS)
    assert all(section.count("RUNS") == 1 for section in sections)
