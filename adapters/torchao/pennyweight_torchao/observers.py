"""Observers: modules that record statistics of tensors and choose quantization parameters from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.planning.granularity import Granularity, MappingType

from .enums import ZeroPointDomain
from .primitives import _fake_quantize_affine, choose_qparams_affine_with_min_max
from .qparams import block_view, get_block_size, require

__all__ = [
    "AffineQuantizedFixedQParamObserver", "AffineQuantizedMSEObserver", "AffineQuantizedMinMaxObserver",
    "AffineQuantizedObserverBase", "_PartialWrapper", "_with_args",
]  # fmt: skip


class _PartialWrapper:
    """A class with some arguments bound; ``with_args`` binds more of them."""

    def __init__(self, p: Any) -> None:
        self.p = p

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.p(*args, **keywords)

    def __repr__(self) -> str:
        return repr(self.p)

    def with_args(self, *args: Any, **kwargs: Any) -> _PartialWrapper:
        return _with_args(self, *args, **kwargs)


def _with_args(cls_or_self: Any, *args: Any, **kwargs: Any) -> _PartialWrapper:
    return _PartialWrapper(partial(cls_or_self, *args, **kwargs))


class AffineQuantizedObserverBase(ABC, nn.Module):
    """An observer: called with a tensor, it records statistics and returns the tensor.

    The arguments are those of :func:`pennyweight_torchao.primitives.choose_qparams_affine`, and a granularity.
    ``Observer.with_args(..)`` is a factory. Raises AssertionError without a granularity, ValueError for a domain None.
    """

    with_args = classmethod(_with_args)

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

    def _qparams(self, low: Tensor, high: Tensor) -> tuple[Tensor, Any]:
        return choose_qparams_affine_with_min_max(
            low, high, self.mapping_type, [], self.target_dtype, self.quant_min, self.quant_max, self.eps,
            self.scale_dtype, self.zero_point_dtype, self.preserve_zero, self.zero_point_domain,
        )  # fmt: skip

    def _seen_qparams(self) -> tuple[Tensor, Any]:
        require(
            hasattr(self, "min_val") and hasattr(self, "max_val"),
            "Expecting the observer has min_val and max_val: run data through it before calculate_qparams",
        )
        return self._qparams(self.min_val, self.max_val)


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
        return self._seen_qparams()


class AffineQuantizedFixedQParamObserver(AffineQuantizedObserverBase):
    """Fixed parameters: buffers ``scale`` and ``zero_point``, default 1 and 0."""

    def __init__(
        self, mapping_type: MappingType, target_dtype: Any, granularity: Granularity, quant_min: float | None = None,
        quant_max: float | None = None, eps: float | None = None, scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, scale: Tensor | None = None,
        zero_point: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        scale = torch.ones(1) if scale is None else scale
        zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
        self.register_buffer("scale", scale.to(scale_dtype))
        self.register_buffer("zero_point", zero_point.to(zero_point_dtype))

    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Replace the parameters, in the dtypes given to the observer."""
        zero_point = torch.zeros_like(scale) if zero_point is None else zero_point
        self.scale = scale.to(self.scale_dtype)
        self.zero_point = zero_point.to(self.zero_point_dtype)

    def forward(self, input: Tensor) -> Tensor:
        return input

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class AffineQuantizedMSEObserver(AffineQuantizedObserverBase):
    """Ranges -r..r of least mean squared error, r = absmax * i / steps of each block, i from 1 to ``steps``.

    Computed from the last tensor; with ``run_once`` from the first. Source: arXiv 2209.13325.
    """

    def __init__(
        self, mapping_type: MappingType, target_dtype: Any, granularity: Granularity, quant_min: float | None = None,
        quant_max: float | None = None, eps: float | None = None, scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, steps: int = 100, run_once: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        self.steps, self.run_once, self.calibrated = steps, run_once, False

    def mse(self, pred: Tensor, expect: Tensor, block_size: Any) -> Tensor:
        """Mean squared difference of each block."""
        view, reduced, _ = block_view((pred - expect).abs().pow(2), block_size)
        return view.mean(reduced) if reduced else view

    def loss_fn(self, x: Tensor, new_min: Tensor, new_max: Tensor) -> Tensor:
        """Mean squared error of each block of x under the parameters of these ranges."""
        block = get_block_size(x.shape, self.granularity)
        scale, zero_point = self._qparams(new_min, new_max)
        fake = _fake_quantize_affine(
            x, block, scale, zero_point, self.target_dtype, self.quant_min, self.quant_max, self.zero_point_domain
        )
        return self.mse(fake, x, block)

    @torch.no_grad()
    def line_search(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The ranges with the least loss."""
        low, high = self._range(input)
        reach = torch.maximum(low.abs(), high)
        best = torch.full_like(low, torch.inf)
        for i in range(1, self.steps + 1):
            limit = reach / self.steps * i
            loss = self.loss_fn(input, -limit, limit)
            low, high = torch.where(loss < best, -limit, low), torch.where(loss < best, limit, high)
            best = torch.minimum(loss, best)
        return low, high

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() and not (self.run_once and self.calibrated):
            self.min_val, self.max_val = self.line_search(input)
            self.calibrated = True
        return input

    def calculate_qparams(self) -> tuple[Tensor, Any]:
        return self._seen_qparams()
