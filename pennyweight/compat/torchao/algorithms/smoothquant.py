"""torchao.prototype.smoothquant: SmoothQuant as two calls of quantize_ around the calibration, or as observers.

    quantize_(model, SmoothQuantConfig(base, "prepare"));  model(batch) ...;  quantize_(model, SmoothQuantConfig(base,
    "convert"))

Each linear layer gets factors s of its input channels: the weight stores W * s, and its input is divided by s. Unlike
``algorithm="smooth"`` of pennyweight.quantize_ nothing is folded into the layer before, so every layer gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ....planning.granularity import MappingType, PerTensor
from ....planning.module_handlers import register_quantize_module_handler
from ..enums import QuantizationStep
from ..int8_float8_views import Int8Tensor, QuantizeTensorToInt8Kwargs, _choose_quant_func_and_quantize_tensor
from .awq import check_step
from .pre_scaled import PreScaledTensor, is_static, quantized_linear, quantized_weight, with_scale
from .v0_9_smoothquant import RecipeObserver, convert_recipe

__all__ = [
    "RunningAbsMaxSmoothQuantObserver", "SmoothQuantConfig", "SmoothQuantObservedLinear", "SmoothQuantObserver",
    "SmoothQuantStep",
]  # fmt: skip

SmoothQuantStep = QuantizationStep  # its name in 0.14
EPS = torch.finfo(torch.float32).eps


def smoothing_factor(x_absmax: Tensor, weight: Tensor, alpha: float | None) -> Tensor:
    """(max|x_j| + eps)^alpha / (max|W_j| + eps)^(1 - alpha) of each channel; ones for alpha None."""
    if alpha is None:
        return torch.ones_like(x_absmax)
    w_absmax = weight.detach().abs().amax(0)
    return torch.pow(x_absmax + EPS, alpha) / torch.pow(w_absmax + EPS, 1 - alpha)


class SmoothQuantObserver(nn.Module):
    """Keeps the inputs of a layer; ``calculate_qparams`` finds its smoothing factor from their range.

    With ``quant_mode``, ``quant_min``, ``quant_max`` or ``eps``, torchao's arguments before 0.14, it is the observer of
    ``insert_smooth_quant_observer_``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        older = len(args) > 2 or kwargs.keys() & {"quant_mode", "quant_min", "quant_max", "eps"}
        return super().__new__(_RecipeObserver if cls is SmoothQuantObserver and older else cls)

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


class _RecipeObserver(RecipeObserver, SmoothQuantObserver):
    """torchao's observer before 0.14, as an instance of the class of today."""


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


@dataclass
class SmoothQuantConfig(AOBaseConfig):
    """SmoothQuant over a config of weights and activations.

    step    "prepare": observe linear layers. "convert": quantize the observed ones; others stay.
            "prepare_for_loading": quantize now without data, for ``load_state_dict`` of a converted model.
            "prepare_for_smoothquant_smoothing_factor": between the two passes of ``use_running_absmax``.
    alpha   0 to 1: how much of the range moves into the weights; None: no smoothing
    base_config with a static activation: its scale is found from the calibration data

    Without ``step`` it is torchao's config before 0.14, ``SmoothQuantConfig(smoothing_factor, act_scales,
    wei_scales)``: int8 weights and inputs, for layers of ``insert_smooth_quant_observer_``; None takes the observer's.
    """

    base_config: Any = None
    step: Any = None
    alpha: float | None = 0.5
    use_running_absmax: bool = False
    smoothing_factor: Tensor | None = None
    act_scales: Tensor | None = None
    wei_scales: Tensor | None = None
    set_inductor_config: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)  # tensors are not among the types that the base class checks

    def __post_init__(self) -> None:
        if self.base_config is None or isinstance(self.base_config, Tensor):
            positional = (self.base_config, self.step, self.alpha if isinstance(self.alpha, Tensor) else None)
            for name, value in zip(("smoothing_factor", "act_scales", "wei_scales"), positional, strict=True):
                if value is not None:
                    assert isinstance(value, Tensor), f"SmoothQuantConfig: {name} must be a tensor, got {value!r}"
                    setattr(self, name, value)
            self.base_config, self.step, self.alpha = None, None, 0.5
            return
        self.step = check_step(self.step)


@register_quantize_module_handler(SmoothQuantConfig)
def _smooth_quant_transform(module: nn.Module, config: SmoothQuantConfig) -> nn.Module:
    layer: Any = module
    if config.step is None:
        return convert_recipe(layer, config.smoothing_factor, config.act_scales, config.wei_scales)
    observer = RunningAbsMaxSmoothQuantObserver if config.use_running_absmax else SmoothQuantObserver
    base = config.base_config
    if config.step == "prepare":
        return SmoothQuantObservedLinear.from_float(layer, observer(layer.weight, config.alpha))
    if config.step == "prepare_for_loading":
        w = layer.weight.detach()
        if is_static(base) and base.act_quant_scale is None:
            asymmetric = base.act_mapping_type is MappingType.ASYMMETRIC
            base = with_scale(base, torch.ones(1), torch.zeros(1, dtype=torch.int8) if asymmetric else None)
        return quantized_linear(layer, PreScaledTensor(quantized_weight(w, base), torch.ones_like(w[0])))
    if not isinstance(layer, SmoothQuantObservedLinear):
        return layer
    if config.step != "convert":
        if config.step.endswith("smoothing_factor") and isinstance(layer.obs, RunningAbsMaxSmoothQuantObserver):
            layer.obs.compute_smoothing_factor()
        return layer
    s, scale, zero_point = layer.obs.calculate_qparams(_activation_kwargs(base))
    if scale is not None:
        base = with_scale(base, scale, zero_point)
    weight = quantized_weight((layer.weight.detach() * s).to(layer.weight.dtype), base)
    return quantized_linear(layer, PreScaledTensor(weight, (1.0 / s).to(layer.weight.dtype)))


def _activation_kwargs(base: Any) -> Any:
    """How to find the scale of a static activation: one for the whole input. None for other configs."""
    if not is_static(base):
        return None
    kwargs = base.get_act_quant_kwargs()
    if isinstance(kwargs, QuantizeTensorToInt8Kwargs):
        return QuantizeTensorToInt8Kwargs(PerTensor(), kwargs.mapping_type, kwargs.reduce_range)
    return kwargs
