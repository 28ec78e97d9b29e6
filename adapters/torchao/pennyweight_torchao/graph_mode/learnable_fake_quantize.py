"""A fake quantizer whose scale and zero point are trained: learned step size quantization (arXiv 1902.08153)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .code_range import EPS
from .fake_quantize import FakeQuantizeBase

__all__ = ["LearnableFakeQuantize", "disable_range_learning", "enable_range_learning"]


class LearnableFakeQuantize(FakeQuantizeBase):
    """The first tensor sets ``scale`` and ``zero_point`` through the observer; they are parameters from then on.

    :meth:`enable_range_learning` trains them and switches the observer off. use_grad_scaling: their gradients are
    multiplied by 1 / sqrt(elements * quant_max). Raises AssertionError if the codes exceed the dtype.
    """

    scale: Any
    zero_point: Any
    eps: Tensor
    learning_enabled: Tensor

    def __init__(
        self, observer: Any, quant_min: int = 0, quant_max: int = 255, use_grad_scaling: bool = False,
        **observer_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert quant_min < quant_max, f"quant_min must be strictly less than quant_max, got {quant_min}, {quant_max}"
        self.quant_min, self.quant_max, self.use_grad_scaling = quant_min, quant_max, use_grad_scaling
        self.scale = self.zero_point = None
        self.activation_post_process: Any = observer(
            **{**observer_kwargs, "quant_min": quant_min, "quant_max": quant_max}
        )
        seen = self.activation_post_process
        info = torch.iinfo(seen.dtype)
        assert info.min <= quant_min, f"quant_min out of bound: {quant_min} is not a code of {seen.dtype}"
        assert quant_max <= info.max, f"quant_max out of bound: {quant_max} is not a code of {seen.dtype}"
        self.dtype, self.qscheme, self.ch_axis = seen.dtype, seen.qscheme, getattr(seen, "ch_axis", -1)
        self.register_buffer(
            "learning_enabled", torch.tensor([0], dtype=torch.uint8, device=torch.get_default_device())
        )
        self.register_buffer("eps", torch.tensor([EPS], dtype=torch.float32, device=torch.get_default_device()))
        self._initialized = False

    def enable_range_learning(self) -> None:
        """Train scale and zero point; the observer no longer changes them."""
        self.learning_enabled[0] = 1
        self.disable_observer()
        self._require_grad(True)

    def disable_range_learning(self) -> None:
        """Keep scale and zero point."""
        self.learning_enabled[0] = 0
        self._require_grad(False)

    def _require_grad(self, on: bool) -> None:
        for parameter in (self.scale, self.zero_point):
            if parameter is not None:
                parameter.requires_grad = on

    def enable_observer(self, enabled: bool = True) -> None:
        """The observer sets the parameters, which are then not trained."""
        super().enable_observer(enabled)
        if enabled:
            self.disable_range_learning()

    def observe_quant_params(self) -> None:
        """Print scale and zero point."""
        print(f"LearnableFakeQuantize Scale: {self.scale.detach()}")
        print(f"LearnableFakeQuantize Zero Point: {self.zero_point.detach()}")

    def calculate_qparams(self, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """(scale, at least eps; zero_point, rounded and clamped to the codes)."""
        self.scale.data.clamp_(min=self.eps.item())
        zero_point = self.zero_point.detach().round().clamp(self.quant_min, self.quant_max).long()
        return self.scale.detach(), zero_point

    def _initialize_or_update_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        if self._initialized:
            self.scale.data.copy_(scale)
            self.zero_point.data.copy_(zero_point.float())
            return
        learns = bool(self.learning_enabled[0] == 1)
        self.scale = nn.Parameter(scale, requires_grad=learns)
        self.zero_point = nn.Parameter(zero_point.float(), requires_grad=learns)
        self._initialized = True

    def forward(self, X: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1 or not self._initialized:
            self.activation_post_process(X.detach())
            self._initialize_or_update_qparams(*self.activation_post_process.calculate_qparams())
        if self.fake_quant_enabled[0] != 1:
            return X
        if self.qscheme in (torch.per_channel_symmetric, torch.per_tensor_symmetric):
            self.zero_point.data.zero_()
        factor = 1.0 / (X.numel() * self.quant_max) ** 0.5 if self.use_grad_scaling else 1.0
        if self.qscheme in (torch.per_channel_symmetric, torch.per_channel_affine):
            return torch._fake_quantize_learnable_per_channel_affine(
                X, self.scale, self.zero_point, self.ch_axis, self.quant_min, self.quant_max, factor
            )
        return torch._fake_quantize_learnable_per_tensor_affine(
            X, self.scale, self.zero_point, self.quant_min, self.quant_max, factor
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if not self._initialized and prefix + "scale" in state_dict:  # parameters do not exist before the first tensor
            values = (state_dict[prefix + name] for name in ("scale", "zero_point"))
            self._initialize_or_update_qparams(*(torch.empty_like(v, device=self.eps.device) for v in values))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, observer_enabled={self.observer_enabled}, "
            f"learning_enabled={self.learning_enabled}, quant_min={self.quant_min}, quant_max={self.quant_max}, "
            f"dtype={self.dtype}, qscheme={self.qscheme}, ch_axis={self.ch_axis}, "
            f"use_grad_scaling={self.use_grad_scaling}, scale={self.scale}, zero_point={self.zero_point}"
        )


def enable_range_learning(mod: nn.Module) -> None:
    """``model.apply(enable_range_learning)``."""
    if isinstance(mod, LearnableFakeQuantize):
        mod.enable_range_learning()


def disable_range_learning(mod: nn.Module) -> None:
    """``model.apply(disable_range_learning)``."""
    if isinstance(mod, LearnableFakeQuantize):
        mod.disable_range_learning()
