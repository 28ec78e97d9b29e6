"""torchao's names in torch.load files: what ``torch.load(weights_only=True)`` may build after ``install``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pennyweight.io.codecs.torchao.reading import GLOBALS

from . import attributes
from .float8_training import products, tensor_0_9, training_tensor
from .low_bit_optim import state_4bit, state_8bit, state_fp8
from .quantized_training import configs, weights


def _at(homes: str, source: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", getattr(source, name)


# Name in a pickle, below "torchao" -> its counterpart here, besides those of files of weights.
MORE: dict[str, Any] = dict(
    (
        *_at("float8 float8.float8_training_tensor", training_tensor, "Float8TrainingTensor"),
        *_at("float8 float8.float8_training_tensor float8.float8_tensor", products, "GemmInputRole", "LinearMMConfig",
             "ScaledMMConfig"),
        *_at("float8.float8_tensor", tensor_0_9, "Float8Tensor"),
        *_at("prototype.quantized_training.int8", weights, "Int8QuantizedTrainingLinearWeight"),
        *_at("prototype.quantized_training.bitnet", weights, "BitNetTrainingLinearWeight",
             "BitNetPacked2bitLinearWeight"),
        *_at("prototype.quantized_training.int8_mixed_precision", weights, "Int8MixedPrecisionTrainingLinearWeight"),
        *_at("prototype.quantized_training.int8_mixed_precision", configs, "Int8MixedPrecisionTrainingConfig"),
        *_at("optim.subclass_8bit prototype.low_bit_optim.subclass_8bit", state_8bit, "OptimState8bit"),
        *_at("optim.subclass_4bit prototype.low_bit_optim.subclass_4bit", state_4bit, "OptimState4bit"),
        *_at("optim.subclass_fp8 prototype.low_bit_optim.subclass_fp8", state_fp8, "OptimStateFp8"),
    )
)  # fmt: skip


def allow(name: str) -> None:
    """Allow these names in torch.load(weights_only=True), under the name of the library."""
    assert attributes.ATTRIBUTES  # loaded tensors have torchao's attributes
    torch.serialization.add_safe_globals([(value, f"{name}.{path}") for path, value in {**GLOBALS, **MORE}.items()])
