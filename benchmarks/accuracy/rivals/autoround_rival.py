"""AutoRound: signed gradient descent on the rounding of each block's weights; 200 steps, its default."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import Row, layers
from benchmarks.accuracy.subjects import Subject


def _run(scheme: str, **options: Any) -> Any:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        texts = [t[None] for batch in subject.calibration() for t in batch["input_ids"]]
        tokenizer = AutoTokenizer.from_pretrained(subject.model_folder, local_files_only=True)
        theirs = AutoRound(
            model, tokenizer, scheme=scheme, dataset=texts, nsamples=len(texts), seqlen=texts[0].shape[1],
            device_map="cpu", enable_torch_compile=False, **options,
        )  # fmt: skip
        quantized, _ = theirs.quantize()
        weights = {n: layer.weight.detach().float() for n, layer in layers(subject, quantized).items()}
        plain = subject.model()
        for n, layer in layers(subject, plain).items():
            layer.weight.data = weights[n]
        return plain

    return run


def _bits(bits: int, group: int) -> Bits:
    return Bits(bits, group, 16 + bits, why=f"float16 scale and {bits}-bit zero per group of {group}")


ROWS = (
    Row("W4A16 g128", _run("W4A16"), _bits(4, 128), subjects=("causal",), slow=True),
    Row("W3A16 g128", _run("W3A16"), _bits(3, 128), subjects=("causal",), slow=True),
    Row("W2A16 g128", _run("W2A16"), _bits(2, 128), subjects=("causal",), slow=True),
)
