"""Observers, and calibration with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from adapters.torchao.tests.snippets.table import normal, snippet


def _min_max(mapping: str, granularity: Any) -> dict[str, Any]:
    from torchao.quantization.observer import AffineQuantizedMinMaxObserver
    from torchao.quantization.quant_primitives import MappingType

    observer = AffineQuantizedMinMaxObserver(
        MappingType[mapping],
        torch.int8,
        granularity=granularity,
        eps=torch.finfo(torch.float32).eps,
        scale_dtype=torch.float32,
        zero_point_dtype=torch.int32,
    )
    for seed in range(3):
        observer(normal(4, 16, seed=seed))
    scale, zero = observer.calculate_qparams()
    return {"scale": scale, "zero": zero, "low": observer.min_val, "high": observer.max_val}


@snippet()
def min_max_per_tensor() -> dict[str, Any]:
    from torchao.quantization import PerTensor

    return _min_max("ASYMMETRIC", PerTensor())


@snippet()
def min_max_per_axis() -> dict[str, Any]:
    from torchao.quantization import PerAxis

    return _min_max("SYMMETRIC", PerAxis(0))


@snippet()
def min_max_in_groups() -> dict[str, Any]:
    from torchao.quantization import PerGroup

    return _min_max("SYMMETRIC", PerGroup(8))


@snippet()
def an_observer_with_arguments() -> dict[str, Any]:
    from torchao.quantization import PerTensor
    from torchao.quantization.observer import AffineQuantizedMinMaxObserver
    from torchao.quantization.quant_primitives import MappingType

    make = AffineQuantizedMinMaxObserver.with_args(MappingType.ASYMMETRIC, torch.uint8, granularity=PerTensor())
    observer = make()
    observer(normal(8, seed=1))
    return {"qparams": list(observer.calculate_qparams())}


@snippet()
def an_observed_layer() -> dict[str, Any]:
    """A layer that records the range of its input, then the static scale of that."""
    from torchao.quantization import PerTensor
    from torchao.quantization.observer import AffineQuantizedMinMaxObserver
    from torchao.quantization.quant_primitives import MappingType

    class Observed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.observer(x))

    layer = Observed(16, 4)
    layer.observer = AffineQuantizedMinMaxObserver(
        MappingType.SYMMETRIC, torch.int8, granularity=PerTensor(), eps=1e-6, scale_dtype=torch.float32
    )
    for seed in range(4):
        layer(normal(3, 16, seed=seed))
    return {"scale": layer.observer.calculate_qparams()[0]}
