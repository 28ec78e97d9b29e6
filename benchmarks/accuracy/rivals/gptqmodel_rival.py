"""GPTQModel: GPTQ for the models that it knows, so causal ones only. Its file is read back by its own torch layers."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import SMOLLM2, Row, layers
from benchmarks.accuracy.subjects import Subject


def _run(**options: Any) -> Any:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        config = QuantizeConfig(**options)
        texts = [{"input_ids": t[None], "attention_mask": torch.ones_like(t)[None]}
                 for batch in subject.calibration() for t in batch["input_ids"]]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            theirs = GPTQModel.load(str(subject.model_folder), config, device="cpu")
            theirs.quantize(texts, batch_size=1)
            theirs.save(folder)
            theirs = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH)
            weights = {n: layer.dequantize_weight().T.float() for n, layer in layers(subject, theirs.model).items()}
        for n, layer in layers(subject, model).items():
            layer.weight.data = weights[n].contiguous()
        return model

    return run


def _bits(bits: int, group: int) -> Bits:
    return Bits(bits, group, 16 + bits, why=f"float16 scale and {bits}-bit zero per group of {group}")


ROWS = (
    Row("GPTQ int4 g128", _run(bits=4, group_size=128), _bits(4, 128), subjects=("causal",)),
    Row("GPTQ int4 g128 act-order", _run(bits=4, group_size=128, desc_act=True, act_group_aware=False), _bits(4, 128),
        subjects=("causal",), note="desc_act=True"),
    Row("GPTQ int4 g128 asymmetric", _run(bits=4, group_size=128, sym=False), _bits(4, 128), subjects=("causal",),
        note="sym=False"),
    Row("GPTQ int3 g128", _run(bits=3, group_size=128), _bits(3, 128), subjects=("causal",)),
    Row("GPTQ int2 g64", _run(bits=2, group_size=64), _bits(2, 64), subjects=("causal", *SMOLLM2)),
    Row("GPTQ int4 g64", _run(bits=4, group_size=64), _bits(4, 64), subjects=SMOLLM2),
    Row("GPTQ int4 g64 asymmetric", _run(bits=4, group_size=64, sym=False), _bits(4, 64), subjects=SMOLLM2,
        note="sym=False"),
    Row("GPTQ int3 g64", _run(bits=3, group_size=64), _bits(3, 64), subjects=SMOLLM2),
)  # fmt: skip
