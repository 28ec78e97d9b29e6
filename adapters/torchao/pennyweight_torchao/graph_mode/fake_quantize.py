"""Fake quantizers: modules that round a tensor to its codes and back in training, with gradients straight through.

y = (clamp(round(x / scale) + zero_point, quant_min, quant_max) - zero_point) * scale; the gradient is 1 where x is not
clamped, else 0. Two buffers switch the parts: ``observer_enabled`` (record ranges), ``fake_quant_enabled`` (round).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from .code_range import is_per_channel, is_per_tensor
from .observer_base import PartialWrapper, bind
from .passive_observers import FixedQParamsObserver
from .range_observers import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

__all__ = [
    "FakeQuantize", "FakeQuantizeBase", "FixedQParamsFakeQuantize", "FusedMovingAvgObsFakeQuantize",
    "disable_fake_quant", "disable_observer", "enable_fake_quant", "enable_observer",
]  # fmt: skip


class FakeQuantizeBase(ABC, nn.Module):
    """Base of fake quantizers. The switches are uint8 tensors, which every communication library can send."""

    fake_quant_enabled: Tensor
    observer_enabled: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "fake_quant_enabled", torch.tensor([1], dtype=torch.uint8, device=torch.get_default_device())
        )
        self.register_buffer(
            "observer_enabled", torch.tensor([1], dtype=torch.uint8, device=torch.get_default_device())
        )

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Record x, round it."""

    @abstractmethod
    def calculate_qparams(self, **kwargs: Any) -> Any:
        """(scale, zero_point)."""

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Round from now on, or not."""
        self.fake_quant_enabled[0] = 1 if enabled else 0

    def disable_fake_quant(self) -> None:
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Record ranges from now on, or keep the parameters."""
        self.observer_enabled[0] = 1 if enabled else 0

    def disable_observer(self) -> None:
        self.enable_observer(False)

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialWrapper:
        """A factory with arguments bound."""
        return bind(cls, **kwargs)


class FakeQuantize(FakeQuantizeBase):
    """An observer and the rounding with its parameters; buffers ``scale`` and ``zero_point``.

    observer: class or factory of the observer, ``activation_post_process``; observer_kwargs go to it. is_dynamic: in
    the converted graph, parameters are computed from each input. Raises AssertionError if the codes exceed the dtype.
    """

    scale: Tensor
    zero_point: Tensor
    activation_post_process: Any

    def __init__(
        self, observer: Any = MovingAverageMinMaxObserver, quant_min: int | None = None, quant_max: int | None = None,
        is_dynamic: bool = False, **observer_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if quant_min is not None and quant_max is not None:
            assert quant_min <= quant_max, f"quant_min must be <= quant_max, got {quant_min} and {quant_max}"
            bound = getattr(getattr(observer, "p", None), "keywords", {})
            dtype = bound.get("dtype", observer_kwargs.get("dtype", torch.quint8))
            assert torch.iinfo(dtype).min <= quant_min, f"quant_min out of bound: {quant_min} is not a code of {dtype}"
            assert quant_max <= torch.iinfo(dtype).max, f"quant_max out of bound: {quant_max} is not a code of {dtype}"
            observer_kwargs.update(quant_min=quant_min, quant_max=quant_max)
        self.activation_post_process = seen = observer(**observer_kwargs, is_dynamic=is_dynamic)
        self.quant_min, self.quant_max, self.is_dynamic = seen.quant_min, seen.quant_max, seen.is_dynamic
        self.dtype, self.qscheme, self.ch_axis = seen.dtype, seen.qscheme, getattr(seen, "ch_axis", -1)
        real = seen.qscheme == torch.per_channel_affine_float_qparams
        device = torch.get_default_device()  # where the observer has its buffers
        self.register_buffer("scale", torch.tensor([1.0], dtype=torch.float, device=device))
        self.register_buffer("zero_point", torch.tensor([0], dtype=torch.float if real else torch.int, device=device))
        assert is_per_channel(self.qscheme) or is_per_tensor(self.qscheme), (
            f"Only per channel and per tensor quantization are supported in fake quantize, got qscheme: {self.qscheme}"
        )
        self.is_per_channel = is_per_channel(self.qscheme)

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.activation_post_process.calculate_qparams()

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            self.activation_post_process(X.detach())
            scale, zero_point = self.calculate_qparams()
            if self.scale.shape != scale.shape:
                self.scale.resize_(scale.shape)
                self.zero_point.resize_(zero_point.shape)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)
        if self.fake_quant_enabled[0] != 1:
            return X
        low, high = self.activation_post_process.quant_min, self.activation_post_process.quant_max
        if self.is_per_channel:
            return torch.fake_quantize_per_channel_affine(X, self.scale, self.zero_point, self.ch_axis, low, high)
        return torch.fake_quantize_per_tensor_affine(X, self.scale, self.zero_point, low, high)

    def extra_repr(self) -> str:
        seen = self.activation_post_process
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, observer_enabled={self.observer_enabled}, "
            f"quant_min={seen.quant_min}, quant_max={seen.quant_max}, dtype={self.dtype}, qscheme={self.qscheme}, "
            f"ch_axis={self.ch_axis}, scale={self.scale}, zero_point={self.zero_point}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in ("scale", "zero_point"):  # per channel they have another size once data was seen
            if prefix + name in state_dict:
                getattr(self, name).resize_(state_dict[prefix + name].shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FixedQParamsFakeQuantize(FakeQuantize):
    """Rounding with known parameters. observer: a factory of :class:`FixedQParamsObserver`, else AssertionError."""

    def __init__(self, observer: Any) -> None:
        super().__init__(observer=observer)
        assert type(self.activation_post_process) is FixedQParamsObserver, (
            f"{type(self).__name__}'s observer must be a {FixedQParamsObserver.__name__}"
        )
        assert is_per_tensor(self.qscheme), f"Only per tensor quantization is supported, got qscheme: {self.qscheme}"
        self._observer_ctr = observer
        self.scale, self.zero_point = self.activation_post_process.scale, self.activation_post_process.zero_point

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """:class:`FakeQuantize` with a moving average of ranges, as one operator of torch.

    Raises AssertionError if the observer is not one of moving averages.
    """

    def __init__(
        self, observer: Any = MovingAverageMinMaxObserver, quant_min: int = 0, quant_max: int = 255,
        **observer_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        averages = (MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver)
        assert isinstance(self.activation_post_process, averages), (
            "Fused observer+fake_quant module only works with MovingAverageMinMaxObserver and its per-channel variant, "
            f"got {type(self.activation_post_process).__name__}"
        )
        # the operator needs switches in int64
        self.register_buffer(
            "fake_quant_enabled", torch.tensor([1], dtype=torch.long, device=torch.get_default_device())
        )
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.long, device=torch.get_default_device()))
        self.is_symmetric_quant = self.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)

    def forward(self, X: Tensor) -> Tensor:
        seen = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            X, self.observer_enabled, self.fake_quant_enabled, seen.min_val, seen.max_val, self.scale, self.zero_point,
            seen.averaging_constant, seen.quant_min, seen.quant_max, self.ch_axis, self.is_per_channel,
            self.is_symmetric_quant,
        )  # fmt: skip


def disable_fake_quant(mod: nn.Module) -> None:
    """``model.apply(disable_fake_quant)``: fake quantizers no longer round."""
    if isinstance(mod, FakeQuantizeBase):
        mod.disable_fake_quant()


def enable_fake_quant(mod: nn.Module) -> None:
    """``model.apply(enable_fake_quant)``: fake quantizers round."""
    if isinstance(mod, FakeQuantizeBase):
        mod.enable_fake_quant()


def disable_observer(mod: nn.Module) -> None:
    """``model.apply(disable_observer)``: fake quantizers keep their parameters."""
    if isinstance(mod, FakeQuantizeBase):
        mod.disable_observer()


def enable_observer(mod: nn.Module) -> None:
    """``model.apply(enable_observer)``: fake quantizers record ranges."""
    if isinstance(mod, FakeQuantizeBase):
        mod.enable_observer()
