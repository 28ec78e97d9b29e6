"""torchao's float8 weight that is packed for a CPU, and its config. Ours is packed when its kernel is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs import Float8DynamicActivationFloat8WeightConfig
from ....planning.granularity import PerGroup, PerRow, PerTensor
from ..format_primitives import _choose_scale_float8, _quantize_affine_float8
from ..int8_float8_views import Float8Tensor, QuantizeTensorToFloat8Kwargs

__all__ = ["Float8DynamicActivationFloat8WeightOpaqueTensorConfig", "Float8OpaqueTensor"]


def _normalized(granularity: Any) -> tuple[Any, Any]:
    """(granularity of inputs, of weights): per tensor by default. Raises ValueError for others than tensors, rows and
    groups, and for groups of inputs that are not those of weights."""
    known = (PerTensor, PerRow, PerGroup)
    if granularity is None:
        return PerTensor(), PerTensor()
    if isinstance(granularity, known):
        return granularity, granularity
    if not isinstance(granularity, (tuple, list)) or len(granularity) != 2:
        raise ValueError(f"Invalid granularity specification: {granularity}; use one of PerTensor, PerRow, PerGroup")
    one, two = granularity
    if not (isinstance(one, known) and isinstance(two, known)):
        raise ValueError(f"Invalid granularity types: {granularity}; use PerTensor, PerRow, PerGroup")
    if isinstance(one, PerGroup) and one != two:
        raise ValueError(f"Groups of inputs must be those of weights, got {one} and {two}")
    return one, two


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightOpaqueTensorConfig(Float8DynamicActivationFloat8WeightConfig):
    """float8 weights and dynamically scaled inputs, per tensor (default), row or group.

    Raises ValueError for another granularity, and for groups of inputs that are not those of weights.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "granularity", _normalized(self.granularity))
        super().__post_init__()


class Float8OpaqueTensor(Float8Tensor):
    """A float8 weight [N, K] whose inputs are quantized too."""

    tensor_attribute_names = ["block_size", "act_quant_kwargs"]  # noqa: RUF012
    optional_tensor_attribute_names: list[str] = []  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        return Float8Tensor.holds(w) and w.act is not None and w.ndim == 2

    @classmethod
    def build(  # type: ignore[override]
        cls, qdata: Tensor, scale: Tensor, block_size: Sequence[int],
        act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None,
    ) -> QT:  # fmt: skip
        """From plain codes [N, K]. Raises ValueError for codes that torchao has packed: their order depends on the
        processor."""
        if qdata.ndim != 2:
            raise ValueError(
                f"Float8OpaqueTensor: codes {list(qdata.shape)} are packed for one processor; quantize the float "
                "weight again with Float8DynamicActivationFloat8WeightConfig"
            )
        return Float8Tensor.build(qdata, scale, list(block_size), act_quant_kwargs=act_quant_kwargs, dtype=scale.dtype)

    @classmethod
    def from_hp(  # type: ignore[override]
        cls, hp_tensor: Tensor, block_size: Sequence[int], act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None
    ) -> QT:
        """scale = absmax of the block / 448. Raises AssertionError without ``act_quant_kwargs``, and for groups of
        inputs that are not those of the weight."""
        assert hp_tensor.ndim == 2, f"Expecting 2D tensor, but got: {list(hp_tensor.shape)}"
        assert act_quant_kwargs is not None, (
            "Activation quantization args must be provided for Float8OpaqueTensor; without them use Float8Tensor"
        )
        group = getattr(act_quant_kwargs.granularity, "group_size", block_size[1])
        assert block_size[1] in (group, hp_tensor.shape[1]), (
            f"input and weight should have the same group size but got {block_size[1]} and {group}"
        )
        scale = _choose_scale_float8(hp_tensor, list(block_size), torch.float8_e4m3fn)
        codes = _quantize_affine_float8(hp_tensor, scale, torch.float8_e4m3fn)
        return Float8Tensor.build(
            codes, scale, list(block_size), act_quant_kwargs=act_quant_kwargs, dtype=hp_tensor.dtype
        )
