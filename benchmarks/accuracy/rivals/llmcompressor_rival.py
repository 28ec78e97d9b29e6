"""llm-compressor: GPTQ, AWQ and SmoothQuant modifiers, symmetric groups of 128 by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import SMOLLM2, TEXT, Row, layers
from benchmarks.accuracy.subjects import Subject

Recipe = Callable[[Subject], list[Any]]


def _oneshot(subject: Subject, model: nn.Module, recipe: Recipe) -> nn.Module:
    from datasets import Dataset
    from llmcompressor import oneshot

    texts = [row for batch in subject.calibration() for row in _rows(batch)]
    longest = max(len(t["input_ids"]) for t in texts)
    oneshot(
        model=model, dataset=Dataset.from_list(texts), recipe=recipe(subject), num_calibration_samples=len(texts),
        max_seq_length=longest, shuffle_calibration_samples=False,
        **({} if subject.kind == "causal" else {"pipeline": "basic"}),
    )  # fmt: skip
    return model


def _rows(batch: dict[str, torch.Tensor]) -> list[dict[str, list[int]]]:
    """Sequences without their padding."""
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return [{"input_ids": ids[m.bool()].tolist(), "attention_mask": m[m.bool()].tolist()}
            for ids, m in zip(batch["input_ids"], masks, strict=True)]  # fmt: skip


def _weights(recipe: Recipe) -> Any:
    """Values of the weights in float32; what a modifier folded into norms comes with them."""

    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize

        model = _oneshot(subject, model, recipe)
        values = {}
        for name, layer in layers(subject, model).items():
            extra = {"g_idx": layer.weight_g_idx} if getattr(layer, "weight_g_idx", None) is not None else {}
            values[name] = fake_quantize(
                layer.weight, layer.weight_scale, getattr(layer, "weight_zero_point", None),
                layer.quantization_scheme.weights, **extra,
            ).float()  # fmt: skip
        plain = subject.model()
        state = {k: v for k, v in model.state_dict().items() if k in plain.state_dict()}
        plain.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
        for name, layer in layers(subject, plain).items():
            layer.weight.data = values[name]
        return plain

    return run


def _as_it_stands(recipe: Recipe) -> Any:
    return lambda subject, model: _oneshot(subject, model, recipe)


def _gptq(scheme: str, **options: Any) -> Recipe:
    def recipe(subject: Subject) -> list[Any]:
        from llmcompressor.modifiers.quantization import GPTQModifier

        return [GPTQModifier(targets=list(subject.layers), scheme=scheme, **options)]

    return recipe


def _groups(bits: int, group: int, symmetric: bool = True) -> Recipe:
    def recipe(subject: Subject) -> list[Any]:
        from llmcompressor.modifiers.quantization import GPTQModifier

        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        return [GPTQModifier(config_groups={"all": {"targets": list(subject.layers), "weights": weights}})]

    return recipe


def _awq(subject: Subject) -> list[Any]:
    from llmcompressor.modifiers.awq import AWQModifier

    return [AWQModifier(targets=list(subject.layers), scheme="W4A16_ASYM")]


def _smooth(subject: Subject) -> list[Any]:
    from llmcompressor.modifiers.quantization import GPTQModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

    return [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(targets=list(subject.layers), scheme="W8A8")]


def _sym(bits: int, group: int) -> Bits:
    return Bits(bits, group, 16, why=f"16-bit scale per group of {group}, no zero point")


INT8 = Bits(8, per_row=16, why="16-bit scale per row")
ROWS = (
    Row("GPTQ W4A16 g128", _weights(_gptq("W4A16")), _sym(4, 128), subjects=TEXT),
    Row("GPTQ W4A16 g128 asymmetric", _weights(_gptq("W4A16_ASYM")),
        Bits(4, 128, 20, why="16-bit scale and 4-bit zero per group of 128"), subjects=TEXT,
        note='scheme="W4A16_ASYM"'),
    Row("GPTQ W3A16 g128", _weights(_groups(3, 128)), _sym(3, 128), subjects=TEXT),
    Row("GPTQ W2A16 g64 asymmetric", _weights(_groups(2, 64, False)),
        Bits(2, 64, 18, why="16-bit scale and 2-bit zero per group of 64"), subjects=TEXT + SMOLLM2),
    Row("GPTQ W4A16 g64", _weights(_groups(4, 64)), _sym(4, 64), subjects=SMOLLM2),
    Row("GPTQ W4A16 g64 asymmetric", _weights(_groups(4, 64, False)),
        Bits(4, 64, 20, why="16-bit scale and 4-bit zero per group of 64"), subjects=SMOLLM2),
    Row("GPTQ W3A16 g64 asymmetric", _weights(_groups(3, 64, False)),
        Bits(3, 64, 19, why="16-bit scale and 3-bit zero per group of 64"), subjects=SMOLLM2),
    Row("AWQ W4A16 g128 asymmetric", _weights(_awq),
        Bits(4, 128, 20, why="16-bit scale and 4-bit zero per group of 128"), subjects=("causal", *SMOLLM2)),
    Row("SmoothQuant + GPTQ W8A8", _as_it_stands(_smooth), INT8, "int8", subjects=("causal", *SMOLLM2),
        note="smoothing_strength=0.8"),
)  # fmt: skip
