"""Float8 configs whose fields hold other values in torchao: a list of two granularities, options of products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pennyweight.planning import configs as ours
from pennyweight.planning.configs.base import AnyDtype, pair
from pennyweight.planning.granularity import PerTensor

from ..enums import Float8MMConfig, Float8PackingFormat, KernelPreference
from .granularity import BLOCKS

__all__ = [
    "Float8DynamicActivationFloat8WeightConfig", "float8_dynamic_activation_float8_weight",
]  # fmt: skip


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(ours.Float8DynamicActivationFloat8WeightConfig):
    """float8 weights and activations, scaled per tensor (default) or per row.

    granularity     one granularity or a pair; becomes the list [activation, weight], which can be passed again
    packing_format  a layout of torchao's GPU kernels; the numbers are the same, stored densely
    mm_config       accepted; products are exact here
    alg_id          the sparse kernel of torchao's GPU library; no effect
    """

    activation_dtype: AnyDtype = torch.float8_e4m3fn
    weight_dtype: AnyDtype = torch.float8_e4m3fn
    granularity: Any = None
    packing_format: Any = Float8PackingFormat.PLAIN
    mm_config: Any = None
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = KernelPreference.AUTO
    set_inductor_config: bool = True
    version: int = 2
    alg_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        both = [*pair(PerTensor() if self.granularity is None else self.granularity)]
        object.__setattr__(self, "granularity", both)
        options = self.mm_config or Float8MMConfig(use_fast_accum=tuple(both) != BLOCKS)
        object.__setattr__(self, "mm_config", options)

    def __hash__(self) -> int:  # a list has none
        return hash((self.activation_dtype, self.weight_dtype, *self.granularity, self.mm_config, self.version))


float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
