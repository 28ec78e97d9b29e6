"""torchao.prototype.awq: AWQ as two calls of quantize_ around the calibration, or as observers inserted beforehand.

    quantize_(model, AWQConfig(base, step="prepare"));  model(batch) ...;  quantize_(model, AWQConfig(base, "convert"))

Each linear layer gets scales s of its input channels: the weight stores W * s, and its input is divided by s. Unlike
``algorithm="awq"`` of pennyweight.quantize_ nothing is folded into the layer before, so every layer gets its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ....planning.granularity import MappingType, PerGroup
from ....planning.module_handlers import register_quantize_module_handler
from ..enums import QuantizationStep, ZeroPointDomain
from ..legacy_weights import WeightTensorWithLinearActivationScaleMetadata
from ..linear_modules import _replace_with_custom_fn_if_matches_filter
from ..observers import AffineQuantizedObserverBase
from ..pre_scaled import PreScaledTensor
from ..v0_8_aqt import to_affine_quantized_intx
from ..v0_8_layouts import Layout, TensorCoreTiledLayout, UintxLayout
from .quantized_layers import quantized_linear, quantized_weight

__all__ = [
    "AWQConfig", "AWQObservedLinear", "AWQObserver", "AWQStep", "AWQUIntXConfig", "awq_uintx", "get_act_scale",
    "insert_awq_observer_",
]  # fmt: skip

logger = logging.getLogger(__name__)
AWQStep = QuantizationStep  # its name in 0.13
UINTS = {getattr(torch, f"uint{bits}"): bits for bits in range(1, 9)}


@torch.no_grad()
def get_act_scale(x: Tensor) -> Tensor:
    """Mean magnitude of each channel: x [.., K] -> [K]."""
    return x.abs().reshape(-1, x.shape[-1]).mean(0)


class AWQObserver(nn.Module):
    """Keeps the inputs of a layer, and searches the scales of their channels.

        s_j = (E|x_j|)^r / sqrt(max_j min_j),  r = i / scale_search_space_size,  i = 0, 1, ..

    ``calculate_qparams()`` returns the s [K] with the least squared error of the layer's output, its weight quantized
    under ``base_config``. r = 0 is plain rounding, so the result is never worse on these inputs.

    ``AWQObserver(weight, bias, granularity, mapping_type, dtype, examples, length, ..)`` of torchao before 0.13 gives
    an :class:`AWQObserverOfExamples`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        older = len(args) > 4 or kwargs.keys() & {"quantization_granularity", "target_dtype", "mapping_type"}
        return super().__new__(AWQObserverOfExamples if cls is AWQObserver and older else cls)

    def __init__(
        self, weight: Tensor, bias: Tensor | None, base_config: AOBaseConfig, scale_search_space_size: int = 20
    ) -> None:
        super().__init__()
        if scale_search_space_size < 1:
            raise ValueError(f"scale_search_space_size must be at least 1, got {scale_search_space_size}")
        self.base_config, self.scale_options = base_config, scale_search_space_size
        self.weight, self.bias, self.device = weight, bias, weight.device
        self.inputs: list[Tensor] = []

    @torch.no_grad()
    def forward(self, input: Tensor, output: Tensor) -> None:
        self.inputs.append(input.detach().reshape(-1, input.shape[-1]).to("cpu", copy=True))

    @torch.no_grad()
    def calculate_qparams(self) -> Tensor:
        """The best scales, [K] in the weight's dtype. Raises AssertionError without inputs."""
        assert self.inputs, "calibrate observer first by running model on exemplar data"
        x = torch.cat(self.inputs).to(self.device)
        w = self.weight.detach()
        wanted = F.linear(x, w, self.bias)

        def loss(s: Tensor) -> float:
            got = F.linear(x / s, quantized_weight(w * s, self.base_config), self.bias)
            return (wanted - got).pow(2).mean().item()

        return _search(get_act_scale(x), w.dtype, self.scale_options, loss, 1e-4).reshape(-1)


def _search(mean: Tensor, dtype: torch.dtype, options: int, loss: Callable[[Tensor], float], least: float) -> Tensor:
    """The candidate with the smallest loss; ones if none has a finite loss."""
    best, found = torch.ones_like(mean, dtype=dtype), float("inf")
    for i in range(options):
        s = mean.pow(i / options).to(dtype)
        s = s.clamp(min=least) if least else s
        s = s / (s.max() * s.min()).sqrt()
        if bool(s.isfinite().all()) and (now := loss(s)) < found:
            best, found = s, now
    return best


class AWQObservedLinear(nn.Linear):
    """A linear layer that passes its inputs and outputs to ``act_obs``."""

    def __init__(
        self, in_features: int, out_features: int, act_obs: nn.Module, bias: bool = True, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act_obs = act_obs

    def forward(self, input: Tensor) -> Tensor:
        output = F.linear(input, self.weight, self.bias)
        self.act_obs(input, output)
        return output

    @classmethod
    def from_float(cls, float_linear: nn.Linear, act_obs: nn.Module) -> AWQObservedLinear:
        """An observed layer with the parameters of ``float_linear``."""
        w = float_linear.weight
        new = cls(float_linear.in_features, float_linear.out_features, act_obs, False, "meta", w.dtype)
        new.weight, new.bias = w, float_linear.bias
        return new.train(float_linear.training)


@dataclass
class AWQConfig(AOBaseConfig):
    """AWQ over a config of the weights.

    step  "prepare": observe linear layers. "convert": quantize the observed ones; others stay.
          "prepare_for_loading": quantize now without data, for ``load_state_dict`` of a converted model
    scale_search_space_size  number of candidates for the scales
    """

    base_config: AOBaseConfig
    step: Any
    scale_search_space_size: int = 20

    def __post_init__(self) -> None:
        self.step = check_step(self.step)


def check_step(step: Any) -> str:
    """The value of a QuantizationStep, from itself or its name in any case. Raises ValueError."""
    text = step.value if isinstance(step, QuantizationStep) else str(step).lower()
    known = [s.value for s in QuantizationStep]
    if text not in known:
        raise ValueError(f"{text} is not one of {known}")
    return text


@register_quantize_module_handler(AWQConfig)
def _awq_transform(module: nn.Module, config: AWQConfig) -> nn.Module:
    layer: Any = module
    if config.step in ("prepare", "prepare_for_loading"):
        observer = AWQObserver(layer.weight, layer.bias, config.base_config, config.scale_search_space_size)
        if config.step == "prepare":
            return AWQObservedLinear.from_float(layer, observer)
        scales = torch.ones(layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
    elif config.step != "convert":
        raise ValueError(f"AWQConfig has the steps prepare, convert and prepare_for_loading, got {config.step!r}")
    elif not isinstance(layer, AWQObservedLinear):
        logger.info("convert: module is not AWQObservedLinear, skipping: %s", type(layer))
        return layer
    else:
        scales = layer.act_obs.calculate_qparams()
    weight = quantized_weight(layer.weight.detach() * scales, config.base_config)
    return quantized_linear(layer, PreScaledTensor(weight, 1.0 / scales))


# -- before 0.13 -------------------------------------------------------------------------------------------------------


class AWQObserverOfExamples(AWQObserver, AffineQuantizedObserverBase):  # type: ignore[misc]
    """torchao's observer before 0.13: the weight has unsigned integers with integer zero points.

    n_validation_examples    the first inputs [.., L, K] that are kept for the search; the mean magnitude is of all
    validation_sequence_len  not used: lengths are read from the inputs
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, quantization_granularity: Any, mapping_type: MappingType,
        target_dtype: torch.dtype, n_validation_examples: int, validation_sequence_len: int,
        scale_search_space_size: int = 20, quant_min: int | None = None, quant_max: int | None = None,
        eps: float | None = None, scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    ) -> None:  # fmt: skip
        AffineQuantizedObserverBase.__init__(
            self, mapping_type, target_dtype, quantization_granularity, quant_min, quant_max, eps, scale_dtype,
            zero_point_dtype, preserve_zero, zero_point_domain,
        )  # fmt: skip
        self.quantization_granularity = quantization_granularity
        self.weight, self.bias, self.device = weight, bias, weight.device
        self.n_validation_examples, self.validation_sequence_len = n_validation_examples, validation_sequence_len
        self.calibration_token_count, self.scale_options = 0, scale_search_space_size
        self.inputs, self.outputs = [], []
        self.average = torch.zeros((1, weight.shape[1]), device=weight.device)

    @torch.no_grad()
    def forward(self, input: Tensor, output: Tensor) -> None:
        if len(self.inputs) < self.n_validation_examples:
            self.inputs.append(input.detach().to("cpu", copy=True))
            self.outputs.append(output.detach().to("cpu", copy=True))
        flat = input.reshape(-1, input.shape[-1])
        self.calibration_token_count += flat.shape[0]
        self.average += flat.abs().sum(0)

    @torch.no_grad()
    def calculate_qparams(self) -> Tensor:
        """The best scales, [1, K]. Raises AssertionError without inputs."""
        assert self.inputs, "calibrate observer first by running model on exemplar data"
        pairs = [(x.to(self.device), y.to(self.device)) for x, y in zip(self.inputs, self.outputs, strict=True)]
        w = self.weight.detach()

        def loss(s: Tensor) -> float:
            q = to_affine_quantized_intx(
                w * s, self.mapping_type, (1, self._group_size()), torch.uint8, self.quant_min, self.quant_max,
                self.eps, self.scale_dtype, self.zero_point_dtype, self.preserve_zero, self.zero_point_domain,
            )  # fmt: skip
            return sum((y - F.linear(x / s, q, self.bias)).pow(2).mean().item() for x, y in pairs)

        return _search(self.average / self.calibration_token_count, w.dtype, self.scale_options, loss, 0.0)

    def _group_size(self) -> int:
        size = self.quantization_granularity.group_size
        return self.weight.shape[1] if size == -1 else size


def insert_awq_observer_(
    model: nn.Module, n_validation_examples: int, validation_sequence_len: int,
    quant_dtype: torch.dtype = torch.uint4, scale_search_space_size: int = 20, group_size: int = 128,
) -> None:  # fmt: skip
    """Replace each linear layer by an :class:`AWQObservedLinear`; group_size -1: one group a row.

    Raises AssertionError for other dtypes than ``torch.uint1`` to ``torch.uint8``.
    """
    assert quant_dtype in UINTS, "Invalid quant_dtype. Please use torch.uint1 .. torch.uint8"

    def observe(layer: Any) -> nn.Module:
        observer = AWQObserverOfExamples(
            layer.weight, layer.bias, PerGroup(group_size), MappingType.ASYMMETRIC, quant_dtype, n_validation_examples,
            validation_sequence_len, scale_search_space_size, 0, 2 ** UINTS[quant_dtype] - 1,
            torch.finfo(torch.float32).eps, zero_point_dtype=torch.int64,
        )  # fmt: skip
        return AWQObservedLinear.from_float(layer, observer)

    _replace_with_custom_fn_if_matches_filter(model, observe, lambda module, _: isinstance(module, nn.Linear))


@dataclass
class AWQUIntXConfig(AOBaseConfig):
    """Quantizes observed layers: ``torch.uint4`` as tinygemm does, other dtypes with integer zero points.

    layout         accepted; the kernel table selects the layout
    group_size     -1: one group a row
    use_hqq        for uint4: zero points by half-quadratic quantization
    """

    quant_dtype: Any = torch.uint4
    layout: Layout | None = None
    group_size: int = 64
    use_hqq: bool = False
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        self.layout = TensorCoreTiledLayout(inner_k_tiles=8) if self.layout is None else self.layout
        assert self.quant_dtype in UINTS, "Invalid quant_dtype. Please use torch.uint1 .. torch.uint8"


awq_uintx = AWQUIntXConfig


@register_quantize_module_handler(AWQUIntXConfig)
def _awq_uintx_transform(module: nn.Module, config: AWQUIntXConfig) -> nn.Module:
    layer: Any = module
    if not isinstance(layer, AWQObservedLinear):
        raise ValueError(
            "AWQUIntXConfig quantizes layers that insert_awq_observer_ has replaced; pass "
            "lambda module, name: isinstance(module, AWQObservedLinear) as filter_fn"
        )
    scales = layer.act_obs.calculate_qparams().reshape(-1)
    w = layer.weight.detach() * scales
    block = (1, w.shape[1] if config.group_size == -1 else config.group_size)
    high = 2 ** UINTS[config.quant_dtype] - 1
    if config.quant_dtype is torch.uint4:
        made: Any = to_affine_quantized_intx(
            w, MappingType.ASYMMETRIC, block, torch.int32, 0, high, 1e-6, zero_point_dtype=torch.bfloat16,
            preserve_zero=False, zero_point_domain=ZeroPointDomain.FLOAT, _layout=config.layout, use_hqq=config.use_hqq,
        )  # fmt: skip
    else:
        made = to_affine_quantized_intx(
            w, MappingType.ASYMMETRIC, block, torch.uint8, 0, high, torch.finfo(torch.float32).eps,
            zero_point_dtype=torch.int64, _layout=UintxLayout(config.quant_dtype),
        )  # fmt: skip
    return quantized_linear(layer, WeightTensorWithLinearActivationScaleMetadata(made, scales))
