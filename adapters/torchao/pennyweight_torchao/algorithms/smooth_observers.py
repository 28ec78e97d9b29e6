"""Observers of SmoothQuant, and the linear layer that holds one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..int8_float8_views import Int8Tensor, QuantizeTensorToInt8Kwargs, _choose_quant_func_and_quantize_tensor

__all__ = ["SmoothQuantObservedLinear", "SmoothQuantObserver"]

EPS = torch.finfo(torch.float32).eps


def smoothing_factor(x_absmax: Tensor, weight: Tensor, alpha: float | None) -> Tensor:
    """(max|x_j| + eps)^alpha / (max|W_j| + eps)^(1 - alpha) of each channel; ones for alpha None."""
    if alpha is None:
        return torch.ones_like(x_absmax)
    w_absmax = weight.detach().abs().amax(0)
    return torch.pow(x_absmax + EPS, alpha) / torch.pow(w_absmax + EPS, 1 - alpha)


class SmoothQuantObserver(nn.Module):
    """Keeps the inputs of a layer; ``calculate_qparams`` finds its smoothing factor from their range."""

    def __init__(self, weight: Tensor, alpha: float | None = 0.5) -> None:
        super().__init__()
        assert weight.ndim == 2, f"the weight must have 2 axes, got {list(weight.shape)}"
        self.weight, self.alpha, self.device = weight, alpha, weight.device
        self.inputs: list[Tensor] = []

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        self.inputs.append(input.detach().reshape(-1, input.shape[-1]).to("cpu", copy=True))
        return input

    @torch.no_grad()
    def calculate_qparams(
        self, weight_quant_kwargs: QuantizeTensorToInt8Kwargs | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(smoothing factor [K], scale and zero point of the smoothed input under the kwargs, or None).

        Raises AssertionError without inputs.
        """
        assert self.inputs, "calibrate observer first by running model on exemplar data"
        x = torch.cat(self.inputs).to(self.device)
        s = smoothing_factor(x.abs().amax(0), self.weight, self.alpha)
        if weight_quant_kwargs is None:
            return s, None, None
        q: Any = _choose_quant_func_and_quantize_tensor(x / s, weight_quant_kwargs)
        taken = Int8Tensor.take(q) if isinstance(q, Int8Tensor) else {"scale": q.scale, "zero_point": q.zero_point}
        return s, taken["scale"], taken["zero_point"]


class SmoothQuantObservedLinear(nn.Linear):
    """A linear layer that passes its inputs to ``obs``. torchao before 0.14 had ``bias`` before ``obs``."""

    def __init__(
        self, in_features: int, out_features: int, obs: Any = None, has_bias: Any = False, device: Any = None,
        dtype: Any = None, bias: bool | None = None,
    ) -> None:  # fmt: skip
        if isinstance(obs, bool):
            obs, has_bias = has_bias, obs
        super().__init__(in_features, out_features, has_bias if bias is None else bias, device, dtype)
        assert isinstance(obs, nn.Module), f"obs must be an observer, got {type(obs).__name__}"
        self.obs = obs

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.obs(input), self.weight, self.bias)

    @classmethod
    def from_float(cls, float_linear: nn.Linear, obs: nn.Module) -> SmoothQuantObservedLinear:
        """An observed layer with the parameters of ``float_linear``."""
        w = float_linear.weight
        new = cls(float_linear.in_features, float_linear.out_features, obs, False, "meta", w.dtype)
        new.weight, new.bias = w, float_linear.bias
        return new.train(float_linear.training)
