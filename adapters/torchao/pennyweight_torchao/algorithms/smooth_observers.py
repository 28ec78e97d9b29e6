"""Observers of SmoothQuant, and the linear layer that holds one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.planning.granularity import PerTensor

from ..int8_float8_views import Int8Tensor, QuantizeTensorToInt8Kwargs, _choose_quant_func_and_quantize_tensor

__all__ = ["RunningAbsMaxSmoothQuantObserver", "SmoothQuantObservedLinear", "SmoothQuantObserver"]

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


class RunningAbsMaxSmoothQuantObserver(nn.Module):
    """Like :class:`SmoothQuantObserver` in constant memory: it keeps the largest magnitude of each channel.

    The scale of a static activation needs a second pass over the data: after the first, ``compute_smoothing_factor()``
    (the step "prepare_for_smoothquant_smoothing_factor") fixes the factors, and the second records the range of x / s.
    """

    def __init__(self, weight: Tensor, alpha: float | None = 0.5) -> None:
        super().__init__()
        assert weight.ndim == 2, f"the weight must have 2 axes, got {list(weight.shape)}"
        self.weight, self.alpha, self.device = weight, alpha, weight.device
        self.x_abs_max: Tensor | None = None
        self.calibration_count = 0
        self._smoothing_factor: Tensor | None = None
        self._range: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def forward(self, input: Tensor) -> Tensor:
        x = input.detach().reshape(-1, input.shape[-1])
        if x.shape[0] == 0:
            return input
        if self._smoothing_factor is None:
            most = x.abs().amax(0).cpu()
            self.x_abs_max = most if self.x_abs_max is None else torch.maximum(self.x_abs_max, most)
            self.calibration_count += 1
            return input
        smooth = x / self._smoothing_factor.to(x.device)
        low, high = smooth.amin().cpu(), smooth.amax().cpu()
        if self._range is not None:
            low, high = torch.minimum(low, self._range[0]), torch.maximum(high, self._range[1])
        self._range = low, high
        return input

    @torch.no_grad()
    def compute_smoothing_factor(self) -> Tensor:
        """Fix the factors; later inputs are recorded smoothed. Raises AssertionError without inputs."""
        self._smoothing_factor, self._range = self._factor(), None
        return self._smoothing_factor

    def _factor(self) -> Tensor:
        assert self.x_abs_max is not None, "calibrate observer first by running model on exemplar data"
        return smoothing_factor(self.x_abs_max.to(self.device), self.weight, self.alpha)

    @torch.no_grad()
    def calculate_qparams(self, weight_quant_kwargs: Any = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As of :class:`SmoothQuantObserver`; the scale, one for the whole input, is None without a second pass.

        weight_quant_kwargs  of Int8Tensor, or a mapping with quant_min, quant_max and is_symmetric
        """
        s = self._factor() if self._smoothing_factor is None else self._smoothing_factor.to(self.device)
        if weight_quant_kwargs is None or self._range is None:
            return s, None, None
        low, high = (end.to(self.device) for end in self._range)
        if not isinstance(weight_quant_kwargs, QuantizeTensorToInt8Kwargs):
            return s, *_from_range(low, high, dict(weight_quant_kwargs))
        kwargs = QuantizeTensorToInt8Kwargs(
            PerTensor(), weight_quant_kwargs.mapping_type, weight_quant_kwargs.reduce_range
        )
        taken = Int8Tensor.take(_choose_quant_func_and_quantize_tensor(torch.stack([low, high])[None], kwargs))  # type: ignore[arg-type]
        return s, taken["scale"], taken["zero_point"]


def _from_range(low: Tensor, high: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    least, most = kwargs.get("quant_min", -128), kwargs.get("quant_max", 127)
    schemes = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    if kwargs.get("is_symmetric", kwargs.get("qscheme") in schemes):
        scale = torch.maximum(low.abs(), high.abs()) / ((most - least) / 2)
        return scale.clamp(min=EPS), torch.zeros(1, dtype=torch.int64, device=low.device)
    scale = ((high - low) / (most - least)).clamp(min=EPS)
    return scale, torch.round(least - low / scale).to(torch.int64)


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
