"""torchao's names in torch.load files: what ``torch.load(weights_only=True)`` may build after ``install``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pennyweight.io.codecs.torchao.reading import GLOBALS

from . import attributes
from .low_bit_optim import state_4bit, state_8bit, state_fp8


def _at(homes: str, source: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", getattr(source, name)


# Name in a pickle, below "torchao" -> its counterpart here, besides those of files of weights.
MORE: dict[str, Any] = dict(
    (
        *_at("optim.subclass_8bit prototype.low_bit_optim.subclass_8bit", state_8bit, "OptimState8bit"),
        *_at("optim.subclass_4bit prototype.low_bit_optim.subclass_4bit", state_4bit, "OptimState4bit"),
        *_at("optim.subclass_fp8 prototype.low_bit_optim.subclass_fp8", state_fp8, "OptimStateFp8"),
    )
)  # fmt: skip


def allow(name: str) -> None:
    """Allow these names in torch.load(weights_only=True), under the name of the library."""
    assert attributes.ATTRIBUTES  # loaded tensors have torchao's attributes
    torch.serialization.add_safe_globals([(value, f"{name}.{path}") for path, value in {**GLOBALS, **MORE}.items()])
