"""float8 with a static activation scale: observed, then converted; or with a scale that is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....planning import configs as ours
from ....planning.configs.base import number, pair, require_float8
from ....planning.granularity import Granularity, MappingType, PerTensor
from ....planning.module_handlers import register_quantize_module_handler
from ....planning.parameters import Site
from ....planning.scheme import Scheme
from ....quantize.pipeline import quantize_
from ..enums import Float8MMConfig, KernelPreference, QuantizationStep
from ..format_primitives import _dequantize_affine_float8, _quantize_affine_float8
from ..int8_float8_views import QuantizeTensorToFloat8Kwargs
from ..observers import AffineQuantizedMinMaxObserver

__all__ = [
    "Float8ObservedLinear", "Float8ObservedSoftmax", "Float8OutputLinear", "Float8QuantizedSoftmax",
    "Float8StaticActivationFloat8WeightConfig", "float8_static_activation_float8_weight",
]  # fmt: skip

_EPS = torch.finfo(torch.float32).eps
# Arguments by place before 0.16, when the scale was the first.
_OLDER = ("act_quant_scale", "activation_dtype", "weight_dtype", "granularity", "mm_config", "set_inductor_config")


@dataclass(frozen=True)
class _Fields:
    step: Any = None
    act_quant_scale: Any = None
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity | None = None
    mm_config: Float8MMConfig | None = None
    kernel_preference: Any = KernelPreference.AUTO
    set_inductor_config: bool = True
    quantize_and_dequantize_output: bool = False
    output_act_quant_scale: Any = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        require_float8(owner, self.weight_dtype, self.activation_dtype)
        pair(self.granularity or PerTensor())
        step = (
            self.step.lower()
            if isinstance(self.step, str) and not isinstance(self.step, QuantizationStep)
            else self.step
        )
        if step is not None:
            known = [s.value for s in QuantizationStep]
            if getattr(step, "value", step) not in known:
                raise ValueError(f"{owner}: step {self.step!r} is not one of {known}")
            object.__setattr__(self, "step", QuantizationStep(getattr(step, "value", step)))
        if self.mm_config is None:
            object.__setattr__(self, "mm_config", Float8MMConfig(use_fast_accum=True))
        for name in ("act_quant_scale", "output_act_quant_scale"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, number(owner, name, value))


class Float8StaticActivationFloat8WeightConfig(_Fields, ours.AOBaseConfig):
    """float8 weights and inputs, with one scale for all inputs of a layer, in one of two ways:

    step="prepare", calls of the model, step="convert"   the largest input that was seen is the largest float8 number
    act_quant_scale (``scale`` before 0.16)              the given scale, a number or a tensor of one element

    granularity                     of the weight; default PerTensor()
    quantize_and_dequantize_output  with step="prepare": round the outputs to float8, too
    output_act_quant_scale          the scale of the outputs, which are then rounded
    mm_config, kernel_preference, set_inductor_config  have no effect

    Softmax layers that a filter selects have their output rounded, with the scale of their range.
    """

    def __init__(self, *args: Any, scale: Any = None, **kwargs: Any) -> None:
        if args and not (args[0] is None or isinstance(args[0], (str, QuantizationStep))):
            kwargs.update(zip(_OLDER, args, strict=False))
            args = ()
        if scale is not None:
            if len(args) > 1 or kwargs.get("act_quant_scale") is not None:
                raise TypeError(f"{type(self).__name__}: scale is the older name of act_quant_scale; pass one of them")
            kwargs["act_quant_scale"] = scale
        super().__init__(*args, **kwargs)

    @property
    def scale(self) -> float | None:
        """``act_quant_scale`` by its older name."""
        return self.act_quant_scale

    def get_act_quant_kwargs(self) -> QuantizeTensorToFloat8Kwargs:
        """The activation quantization as torchao's kwargs."""
        return QuantizeTensorToFloat8Kwargs(
            self.activation_dtype, self.granularity or PerTensor(), self.mm_config,
            kernel_preference=self.kernel_preference,
        )  # fmt: skip

    def with_scale(self, scale: Any) -> ours.Float8StaticActivationFloat8WeightConfig:
        """Our config with this activation scale."""
        return ours.Float8StaticActivationFloat8WeightConfig(
            scale, self.activation_dtype, self.weight_dtype, self.granularity
        )

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return self.with_scale(self.act_quant_scale).scheme(site, on_indivisible)


float8_static_activation_float8_weight = Float8StaticActivationFloat8WeightConfig


# -- layers ------------------------------------------------------------------------------------------------------------


def _adopt(new: nn.Linear, old: nn.Linear) -> Any:
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


class Float8ObservedLinear(nn.Linear):
    """A linear layer that shows its inputs, and its outputs if asked, to observers."""

    def __init__(
        self, in_features: int, out_features: int, input_act_obs: nn.Module, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, output_act_obs: nn.Module | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.input_act_obs, self.output_act_obs = input_act_obs, output_act_obs

    def forward(self, input: Tensor) -> Tensor:
        self.input_act_obs(input)
        output = nn.functional.linear(input, self.weight, self.bias)
        return output if self.output_act_obs is None else self.output_act_obs(output)

    @classmethod
    def from_float(
        cls, float_linear: nn.Linear, input_act_obs: nn.Module, output_act_obs: nn.Module | None = None
    ) -> Float8ObservedLinear:
        """A layer that shares the weight and bias of another."""
        old = float_linear
        new = cls(
            old.in_features, old.out_features, input_act_obs, old.bias is not None, "meta", old.weight.dtype,
            output_act_obs,
        )  # fmt: skip
        return _adopt(new, old)


def _rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to float8 times a scale of one element."""
    scale = scale.reshape((1,) * x.ndim)
    return _dequantize_affine_float8(_quantize_affine_float8(x, scale, dtype), scale, x.dtype)


class Float8OutputLinear(nn.Linear):
    """A linear layer whose output is rounded to ``float8_dtype`` times the buffer ``output_act_quant_scale``."""

    output_act_quant_scale: Tensor

    def __init__(
        self, in_features: int, out_features: int, scale: Tensor, float8_dtype: torch.dtype, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, **kwargs)
        self.register_buffer("output_act_quant_scale", scale.detach().float().reshape(1))
        self.float8_dtype = float8_dtype

    def forward(self, input: Tensor) -> Tensor:
        output = nn.functional.linear(input, self.weight, self.bias)
        return _rounded(output, self.output_act_quant_scale, self.float8_dtype)


class Float8ObservedSoftmax(nn.Softmax):
    """A softmax to be converted. Its output is in [0, 1], so it needs no observer."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__(dim=dim)
        self._device: torch.device | None = None

    def forward(self, input: Tensor) -> Tensor:
        self._device = input.device
        return super().forward(input)

    @classmethod
    def from_float(cls, float_softmax: nn.Softmax) -> Float8ObservedSoftmax:
        return cls(dim=float_softmax.dim)


class Float8QuantizedSoftmax(nn.Module):
    """A softmax whose output is rounded to float8 times the buffer ``output_act_quant_scale``; None: not rounded.

    torchao's scale of a converted softmax is the largest float8 number, with which the outputs, at most 1, are rounded
    to zero. Here :func:`from_observed` uses the scale that it is given, and the config gives 1 / that number.
    """

    def __init__(
        self, dim: int | None = None, output_act_quant_scale: Tensor | None = None,
        output_act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._dim = dim
        self.register_buffer("output_act_quant_scale", output_act_quant_scale)
        self.output_act_quant_kwargs = output_act_quant_kwargs

    @property
    def dim(self) -> int | None:
        return self._dim

    def forward(self, input: Tensor) -> Tensor:
        output = nn.functional.softmax(input, self._dim, _stacklevel=5)
        if self.output_act_quant_kwargs is None or self.output_act_quant_scale is None:
            return output
        return _rounded(output, self.output_act_quant_scale, self.output_act_quant_kwargs.float8_dtype)

    @classmethod
    def from_observed(
        cls, observed_softmax: Float8ObservedSoftmax, output_act_quant_scale: Tensor,
        output_act_quant_kwargs: QuantizeTensorToFloat8Kwargs,
    ) -> Float8QuantizedSoftmax:  # fmt: skip
        return cls(observed_softmax.dim, output_act_quant_scale, output_act_quant_kwargs)


# -- steps -------------------------------------------------------------------------------------------------------------


def _observer(config: Float8StaticActivationFloat8WeightConfig) -> nn.Module:
    """The scale of an activation is fixed for batches of any size, so it is one for the tensor."""
    return AffineQuantizedMinMaxObserver(
        MappingType.SYMMETRIC, config.activation_dtype, PerTensor(), eps=_EPS, scale_dtype=torch.float32,
        zero_point_dtype=torch.float32, keepdim=True,
    )  # fmt: skip


def _quantized(old: nn.Linear, config: Float8StaticActivationFloat8WeightConfig, scale: Any, output: Any) -> nn.Module:
    """A layer with the quantized weight of another, and rounded outputs if there is a scale for these."""
    sizes, bias = (old.in_features, old.out_features), old.bias is not None
    if output is None:
        new: nn.Linear = nn.Linear(*sizes, bias, "meta")
    else:
        output = torch.as_tensor(output, device=old.weight.device)
        new = Float8OutputLinear(*sizes, output, config.activation_dtype, bias=bias)
    _adopt(new, old)
    quantize_(new, config.with_scale(scale), lambda module, name: True)
    return new


@register_quantize_module_handler(Float8StaticActivationFloat8WeightConfig)
def _transform(module: nn.Module, config: Float8StaticActivationFloat8WeightConfig) -> nn.Module:
    if config.step is QuantizationStep.PREPARE:
        if isinstance(module, nn.Softmax):
            return Float8ObservedSoftmax.from_float(module)
        if not isinstance(module, nn.Linear):
            raise ValueError(f'step="prepare" needs linear or softmax layers, got {type(module).__name__}')
        output = _observer(config) if config.quantize_and_dequantize_output else None
        return Float8ObservedLinear.from_float(module, _observer(config), output)
    if config.step is QuantizationStep.CONVERT:
        if isinstance(module, Float8ObservedSoftmax):
            scale = torch.tensor([1 / torch.finfo(config.activation_dtype).max], device=module._device or "cpu")
            return Float8QuantizedSoftmax.from_observed(module, scale, config.get_act_quant_kwargs())
        if not isinstance(module, Float8ObservedLinear):
            return module
        return _quantized(module, config, _scale_of(module.input_act_obs), _scale_of(module.output_act_obs))
    if config.step is not None:
        raise ValueError(f'unexpected step {config.step}; use "prepare" or "convert"')
    if config.act_quant_scale is None:
        raise ValueError(
            'act_quant_scale must be provided if step is None; or use step="prepare", call the model with data, and '
            'use step="convert"'
        )
    if not isinstance(module, nn.Linear):
        raise ValueError(f"a given act_quant_scale needs linear layers, got {type(module).__name__}")
    if config.output_act_quant_scale is None:
        quantize_(module, config.with_scale(config.act_quant_scale), lambda found, name: True)
        return module
    return _quantized(module, config, config.act_quant_scale, config.output_act_quant_scale)


def _scale_of(observer: Any) -> Tensor | None:
    if observer is None:
        return None
    if not hasattr(observer, "min_val"):
        raise ValueError('an observed layer has seen no input; call the model with data before step="convert"')
    return observer.calculate_qparams()[0].detach()
