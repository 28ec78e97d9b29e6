"""Observers of the minimum and maximum: of all data, or averaged over batches; per tensor or per channel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .code_range import EPS, is_per_tensor
from .observer_base import UniformQuantizationObserverBase, _factory, channel_rows, check_per_channel, refuse

__all__ = [
    "MinMaxObserver", "MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
]  # fmt: skip


class _RangeObserver(UniformQuantizationObserverBase):
    """Buffers ``min_val`` and ``max_val``; how they are updated is in :meth:`_merge`."""

    min_val: Tensor
    max_val: Tensor

    def _merge(self, seen: Tensor, new: Tensor, low: bool) -> Tensor:
        return torch.minimum(new, seen) if low else torch.maximum(new, seen)

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(scale, zero_point) of what was recorded."""
        return self._calculate_qparams(self.min_val, self.max_val)

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


class MinMaxObserver(_RangeObserver):
    """The minimum and maximum of all tensors. Raises NotImplementedError unless the qscheme is per tensor."""

    def __init__(
        self, dtype: torch.dtype = torch.quint8, qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False, quant_min: int | None = None, quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        refuse(not is_per_tensor(qscheme), f"{name}'s qscheme only supports per-tensor schemes, but got: {qscheme}")
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic, **kwargs)
        self.register_buffer("min_val", torch.tensor(torch.inf, **_factory(factory_kwargs)))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **_factory(factory_kwargs)))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Record ``x_orig``; an empty one is ignored."""
        if x_orig.numel() == 0:
            return x_orig
        low, high = torch.aminmax(x_orig.detach().to(self.min_val.dtype))
        self.min_val.copy_(self._merge(self.min_val, low, low=True))
        self.max_val.copy_(self._merge(self.max_val, high, low=False))
        return x_orig

    def reset_min_max_vals(self) -> None:
        self.min_val.fill_(torch.inf)
        self.max_val.fill_(-torch.inf)


class MovingAverageMinMaxObserver(MinMaxObserver):
    """low = low + c * (new low - low), also the maximum; c = ``averaging_constant``. The first tensor sets both.

    With c = 1 the range is that of the last tensor, which dynamic fake quantization needs. Raises NotImplementedError
    if ``is_dynamic`` and c is another number.
    """

    def __init__(
        self, averaging_constant: float = 0.01, dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine, reduce_range: bool = False, quant_min: int | None = None,
        quant_max: int | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        refuse(
            is_dynamic and averaging_constant != 1,
            "MovingAverageMinMaxObserver doesn't support dynamic quantization for averaging constant of "
            f"{averaging_constant}: it must be 1",
        )
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, eps=eps, is_dynamic=is_dynamic, **kwargs)
        self.averaging_constant = averaging_constant

    def _merge(self, seen: Tensor, new: Tensor, low: bool) -> Tensor:
        first = seen == (torch.inf if low else -torch.inf)
        return torch.where(first, new, seen + self.averaging_constant * (new - seen))


class PerChannelMinMaxObserver(_RangeObserver):
    """The minimum and maximum of each index of ``ch_axis``. The buffers are empty before the first tensor.

    Raises NotImplementedError unless the qscheme is per channel and static.
    """

    def __init__(
        self, ch_axis: int = 0, dtype: torch.dtype = torch.quint8, qscheme: torch.qscheme = torch.per_channel_affine,
        reduce_range: bool = False, quant_min: int | None = None, quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        check_per_channel(type(self).__name__, qscheme, is_dynamic)
        super().__init__(dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic, **kwargs)
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.tensor([], **_factory(factory_kwargs)))
        self.register_buffer("max_val", torch.tensor([], **_factory(factory_kwargs)))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Record ``x_orig``; an empty one is ignored."""
        if x_orig.numel() == 0:
            return x_orig
        low, high = torch.aminmax(channel_rows(x_orig.detach().to(self.min_val.dtype), self.ch_axis), dim=1)
        if self.min_val.numel() and self.max_val.numel():
            low, high = self._merge(self.min_val, low, low=True), self._merge(self.max_val, high, low=False)
        self.min_val.resize_(low.shape).copy_(low)
        self.max_val.resize_(high.shape).copy_(high)
        return x_orig

    def reset_min_max_vals(self) -> None:
        self.min_val = self.min_val.new_empty(0)
        self.max_val = self.max_val.new_empty(0)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str], *rest: Any
    ) -> None:
        version = local_metadata.get("version")
        for name in ("min_val", "max_val"):
            key = prefix + name
            old = key + "s"
            if version is not None and version < 3 and old in state_dict:  # the buffers' names before version 3
                state_dict[key] = state_dict.pop(old)
            if key in state_dict:  # an observer that has seen nothing has buffers of another size
                getattr(self, name).resize_(state_dict[key].shape)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *rest)


class MovingAveragePerChannelMinMaxObserver(PerChannelMinMaxObserver):
    """Per channel: low = low + c * (new low - low), the same for the maximum; c = ``averaging_constant``."""

    def __init__(
        self, averaging_constant: float = 0.01, ch_axis: int = 0, dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_channel_affine, reduce_range: bool = False, quant_min: int | None = None,
        quant_max: int | None = None, eps: float = EPS, is_dynamic: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            ch_axis, dtype, qscheme, reduce_range, quant_min, quant_max, eps=eps, is_dynamic=is_dynamic, **kwargs
        )
        self.averaging_constant = averaging_constant

    def _merge(self, seen: Tensor, new: Tensor, low: bool) -> Tensor:
        return seen + self.averaging_constant * (new - seen)
