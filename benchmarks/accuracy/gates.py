"""Whether the language model is real enough for what is measured on it to mean anything.

A model trained too briefly has neither outliers nor structure in its inputs: methods that need them look better or
worse than they are. The bounds hold for language models of billions of weights as published by their quantizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals.base import calibrate, layers
from benchmarks.accuracy.subjects import Subject

SUBJECT = "lm"
# rows that stand for a kind, the first that was measured
GPTQ = (
    ("llm-compressor", "GPTQ W4A16 g128"), ("gptqmodel", "GPTQ int4 g128"), ("pennyweight", "int4 g128 gptq"),
)  # fmt: skip
SYM4 = (("torchao", "int4 g128"), ("pennyweight", "int4 g128"))
SYM3 = (("torchao", "int3 g128"), ("pennyweight", "int3 g128"))
W8A8 = (("torchao", "W8A8 dynamic"), ("pennyweight", "int8-dynamic"))
W8 = (("torchao", "int8 weight-only"), ("pennyweight", "int8"))


def check(results: Results) -> list[dict[str, Any]]:
    """[{"gate", "value", "low", "high", "passed"}]; value None, and not passed, where it was not measured.

    None at all where the language model, which they are about, has no row."""
    if SUBJECT not in results.subjects():
        return []
    kl = {name: _kl(results, rows) for name, rows in
          {"gptq": GPTQ, "sym4": SYM4, "sym3": SYM3, "w8a8": W8A8, "w8": W8}.items()}  # fmt: skip
    found = (
        ("KL of round to nearest, 4 bits, symmetric groups of 128", kl["sym4"], 0.003, 0.1),
        (
            "KL of GPTQ divided by that of round to nearest, 4 bits, symmetric groups of 128",
            _quotient(kl["gptq"], kl["sym4"]),
            0.2,
            0.7,
        ),
        ("KL of 8-bit weights and inputs divided by that of 8-bit weights", _quotient(kl["w8a8"], kl["w8"]), 3.0, None),
        ("effective rank of the inputs' second moments divided by their number", results.rank, None, 0.15),
        ("KL of 3 bits divided by that of 4, symmetric groups of 128", _quotient(kl["sym3"], kl["sym4"]), 3.0, 6.0),
    )
    return [
        {"gate": what, "value": value, "low": low, "high": high,
         "passed": value is not None and (low is None or value >= low) and (high is None or value <= high)}
        for what, value, low, high in found
    ]  # fmt: skip


def _kl(results: Results, rows: tuple[tuple[str, str], ...]) -> float | None:
    found = (results.find(SUBJECT, *row) for row in rows)
    return next((float(r["figures"]["values"]["kl"]) for r in found if r), None)


def _quotient(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def effective_rank(subject: Subject, model: nn.Module | None = None) -> float:
    """exp(entropy of the eigenvalues' shares) of E[x x^T] by the number of inputs, mean over the layers.

    x are the layers' inputs over the calibration data.
    """
    model = subject.model() if model is None else model
    sums: dict[str, Tensor] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + x.T @ x

        return hook

    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in layers(subject, model).items()]
    calibrate(subject, model)
    for handle in handles:
        handle.remove()
    shares = []
    for h in sums.values():
        p = torch.linalg.eigvalsh(h).clamp_min(0)
        p = p / p.sum()
        shares.append(float(torch.exp(-(p * p.clamp_min(1e-300).log()).sum())) / len(p))
    return sum(shares) / len(shares)
