"""Observers: modules that record statistics of tensors and choose quantization parameters from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.planning.granularity import Granularity, MappingType

from .enums import ZeroPointDomain
from .graph_mode.observer_base import bind
from .primitives import choose_qparams_affine_with_min_max
from .qparams import block_view, get_block_size, require

__all__ = [
    "AffineQuantizedMinMaxObserver", "AffineQuantizedObserverBase",
]  # fmt: skip


class AffineQuantizedObserverBase(ABC, nn.Module):
    """An observer: called with a tensor, it records statistics and returns the tensor.

    The arguments are those of :func:`pennyweight_torchao.primitives.choose_qparams_affine`, and a granularity.
    ``Observer.with_args(..)`` is a factory. Raises AssertionError without a granularity, ValueError for a domain None.
    """

    with_args = classmethod(bind)

    def __init__(
        self, mapping_type: MappingType, target_dtype: Any, granularity: Granularity, quant_min: float | None = None,
        quant_max: float | None = None, eps: float | None = None, scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, keepdim: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        require(granularity is not None, "granularity is None")
        if zero_point_domain is None:
            raise ValueError("Please use ZeroPointDomain.NONE instead of None")
        self.mapping_type, self.target_dtype, self.granularity = mapping_type, target_dtype, granularity
        self.quant_min, self.quant_max, self.eps = quant_min, quant_max, eps
        self.scale_dtype, self.zero_point_dtype = scale_dtype, zero_point_dtype
        self.preserve_zero, self.zero_point_domain, self.keepdim = preserve_zero, zero_point_domain, keepdim

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Any]:
        """(scale, zero_point) from the recorded statistics."""

    def _range(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of each block."""
        x = input.detach()
        view, reduced, _ = block_view(x, get_block_size(x.shape, self.granularity))
        if not reduced:
            return view.clone(), view.clone()
        low, high = view.amin(reduced, keepdim=self.keepdim), view.amax(reduced, keepdim=self.keepdim)
        return low, high


class AffineQuantizedMinMaxObserver(AffineQuantizedObserverBase):
    """Parameters from the running minimum and maximum of each block.

    Raises AssertionError if the number of blocks changes; empty tensors are ignored.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == 0:
            return input
        low, high = self._range(input)
        if not hasattr(self, "min_val"):
            self.min_val, self.max_val = low, high
            return input
        require(
            self.min_val.shape == low.shape,
            f"Can't update existing min_val - shape mismatch, self.min_val:{self.min_val.shape} != min_val:{low.shape}",
        )
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))
        return input

    def calculate_qparams(self) -> tuple[Tensor, Any]:
        require(
            hasattr(self, "min_val") and hasattr(self, "max_val"),
            "Expecting the observer has min_val and max_val: run data through it before calculate_qparams",
        )
        return choose_qparams_affine_with_min_max(
            self.min_val, self.max_val, self.mapping_type, [], self.target_dtype, self.quant_min, self.quant_max,
            self.eps, self.scale_dtype, self.zero_point_dtype, self.preserve_zero, self.zero_point_domain,
        )  # fmt: skip
