"""What a row of the comparison is, and what rows share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.accounting import Bits, BitsByColumns
from benchmarks.accuracy.subjects import Batch, Subject

TEXT, ALL, CONVOLUTIONS = ("causal", "encoder"), ("causal", "encoder", "digits-vit"), ("digits-conv", "pitch")
SMOLLM2 = ("smollm2",)
NAMED = SMOLLM2  # subjects with rows that name them: groups of 128 do not divide their rows


@dataclass(frozen=True)
class Row:
    """One method of a family.

    run      (subject, fresh float32 model) -> the quantized model. Where inputs stay float, it has the float model's
             state again, in float32, every weight as its codes say; else it is run as it stands
    bits     what is stored; None: counted by what run returns, then (model, bits)
    inputs   what the layers' inputs become: "" where they stay float
    subjects kinds, or names, of the subjects that it is for
    note     how it was called, where that is not by its defaults
    slow     takes minutes
    """

    name: str
    run: Callable[[Subject, nn.Module], Any]
    bits: Bits | BitsByColumns | None
    inputs: str = ""
    subjects: tuple[str, ...] = ALL
    note: str = ""
    slow: bool = False

    def takes(self, kind: str, name: str) -> bool:
        """Whether it is for a subject of that kind and name."""
        return name in self.subjects or (kind in self.subjects and name not in NAMED)


def layers(subject: Subject, model: nn.Module) -> dict[str, Any]:
    """The modules to be quantized, by name."""
    return {name: model.get_submodule(name) for name in subject.layers}


def each_weight(function: Callable[[Tensor], Tensor]) -> Callable[[Subject, nn.Module], nn.Module]:
    """A row's run from a function of one float32 weight that returns what became of it."""

    def run(subject: Subject, model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for name, layer in layers(subject, model).items():
                value = function(layer.weight.detach().clone())
                if value.shape != layer.weight.shape:
                    raise ValueError(f"{name}: {list(layer.weight.shape)} became {list(value.shape)}")
                layer.weight.copy_(value.float())
        return model

    return run


def calibrate(subject: Subject, model: nn.Module, batches: list[Batch] | None = None) -> None:
    """Run the calibration batches through a model, for what listens inside."""
    with torch.no_grad():
        for batch in subject.calibration() if batches is None else batches:
            model(**batch)


def second_moments(subject: Subject, model: nn.Module) -> dict[str, Tensor]:
    """Mean square of each input of each layer over the calibration data: float32 [columns]; padding left out."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: list[Tensor | None] = [None]

    def listen(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0] if mask[0] is None else inputs[0][mask[0]]
            x = x.reshape(-1, x.shape[-1]).double()
            sums[name] = sums.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in layers(subject, model).items()]
    for batch in subject.calibration():
        mask[0] = batch["attention_mask"].bool() if "attention_mask" in batch else None
        calibrate(subject, model, [batch])
    for handle in handles:
        handle.remove()
    return {name: (sums[name] / counts[name]).float() for name in sums}
