"""torchao.quantization.qat.fake_quantizer: modules that quantize and dequantize a tensor, with torchao's gradients.

The values and gradients are those of torchao: straight-through within the codes, zero for elements that are clamped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.planning.granularity import PerAxis, PerGroup, PerRow, PerToken

from ..enums import MappingType
from ..format_primitives import _choose_scale_float8, _dequantize_affine_float8, _quantize_affine_float8
from ..groupwise import get_group_qparams_symmetric, get_groupwise_affine_qparams
from ..int8_matmul import _get_per_token_block_size
from ..primitives import _fake_quantize_affine
from ..qparams import (
    _DTYPE_TO_BIT_WIDTH,
    _DTYPE_TO_QVALUE_BOUNDS,
    _Round,
    choose_qparams_affine,
    get_block_size,
    require,
)
from .fake_quantize_configs import (
    FakeQuantizeConfigBase,
    Float8FakeQuantizeConfig,
    Int4WeightFakeQuantizeConfig,
    IntxFakeQuantizeConfig,
)
from .functions import (
    AnyOfBase,
    _fake_quantize_per_channel_group,
    _fake_quantize_per_token,
    _log_deprecation_warning,
)

__all__ = ["FakeQuantizer", "FakeQuantizerBase", "Float8FakeQuantizer", "Int4WeightFakeQuantizer", "IntxFakeQuantizer"]


class FakeQuantizerBase(nn.Module):
    """Quantizes and dequantizes its input as its config says, in the input's dtype; the identity if not ``enabled``."""

    config: Any
    enabled: bool

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.enabled = config, True

    def forward(self, x: Tensor) -> Tensor:
        return self.fake_quantize(x) if self.enabled else x

    def fake_quantize(self, x: Tensor) -> Tensor:
        """The quantized values of x."""
        raise TypeError(f"{type(self).__name__} has no formula; use FakeQuantizerBase.from_config(config)")

    def __repr__(self) -> str:
        return f"FakeQuantizer({self.config})"

    @staticmethod
    def from_config(config: FakeQuantizeConfigBase) -> FakeQuantizerBase:
        """The fake quantizer of a config. Raises ValueError for an unknown one."""
        for kind, quantizer in _QUANTIZERS.items():
            if isinstance(config, kind):
                return quantizer(config)
        raise ValueError(f"Unknown config type: {config}")


class Float8FakeQuantizer(FakeQuantizerBase):
    """float8 with one scale max|x| / 448 (of e4m3) per row or tensor; the scale has a gradient, too."""

    config: Float8FakeQuantizeConfig

    def fake_quantize(self, x: Tensor) -> Tensor:
        c = self.config
        block = get_block_size(x.shape, c.granularity)
        bounds = {"hp_value_lb": c.hp_value_lb, "hp_value_ub": c.hp_value_ub}
        scale = _choose_scale_float8(x, block, c.dtype, **bounds)
        return _dequantize_affine_float8(_quantize_affine_float8(x, scale, c.dtype), scale, x.dtype)


class Int4WeightFakeQuantizer(FakeQuantizerBase):
    """int4 matrices in groups, as the GPU kernels of torchao's int4 weights round them; scales have gradients.

    for bfloat16 inputs  codes 0..15, scale = (max - min) / 15 at least 1e-6, values code * scale + min
    for float8 inputs    first float8 with a scale per row, then codes -8..7 with scale = max|x| / 8, at least 1e-6
    """

    config: Int4WeightFakeQuantizeConfig

    def fake_quantize(self, w: Tensor) -> Tensor:
        require(w.dim() == 2, f"expected a matrix, got a tensor of shape {list(w.shape)}")
        if self.config.activation_dtype is torch.bfloat16:
            return self._with_offset(w)
        return self._through_float8(w)

    def _through_float8(self, w: Tensor) -> Tensor:
        group = self.config.group_size
        scale = _choose_scale_float8(w, get_block_size(w.shape, PerRow()), torch.float8_e4m3fn, hp_value_lb=1e-12)
        w8 = _dequantize_affine_float8(_quantize_affine_float8(w, scale), scale, w.dtype)
        scale = (w8.view(w8.shape[0], -1, group).abs().amax(-1) / 8).clamp(min=1e-6)
        values = _fake_quantize_affine(w8, (1, group), scale, torch.zeros_like(scale), torch.int8, -8, 7)
        return values.to(w.dtype)

    def _with_offset(self, w: Tensor) -> Tensor:
        groups = w.to(torch.float32).view(w.shape[0], -1, self.config.group_size)
        high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
        scale = (high - low).clamp(min=1e-6) / 15
        codes = _Round.apply((groups - low) / scale).clamp(0, 15)
        return ((codes - 8) * scale + (low + scale * 8)).view(w.shape).to(w.dtype)


class IntxFakeQuantizer(FakeQuantizerBase):
    """Integers per token, channel or group.

    scale, zero_point  those of the last forward pass, which are recomputed in each (``is_dynamic``) or kept. With
                       ``range_learning`` parameters: call :func:`initialize_fake_quantizers` before making an optimizer

    Asymmetric groups have tinygemm's zero points, values of the middle code, also where the config says that zero
    points are integers: torchao rounds them to its ``zero_point_precision`` and uses them as codes.
    """

    config: IntxFakeQuantizeConfig
    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, config: IntxFakeQuantizeConfig) -> None:
        super().__init__(config)
        self.scale = self.zero_point = None
        self._scale_eps = 1e-9  # the least scale from which a range is learned
        self._initialized = False

    def fake_quantize(self, x: Tensor) -> Tensor:
        c = self.config
        found = self.scale is not None and self.zero_point is not None
        if c.range_learning and not self._initialized and not found:
            raise ValueError(
                "Scales and zero points must be initialized for range learning. Please call "
                "`torchao.quantization.qat.initialize_fake_quantizers` before initializing the optimizer and beginning "
                "training."
            )
        if not isinstance(c.granularity, (PerToken, PerAxis, PerGroup)):
            raise ValueError(f"Unknown granularity '{c.granularity}'; use PerToken, PerAxis(0) or PerGroup")
        if c.is_dynamic or not found:
            self._choose(x)
        low, high = _DTYPE_TO_QVALUE_BOUNDS[c.dtype]
        if isinstance(c.granularity, PerToken):
            return _fake_quantize_per_token(x, self.scale, self.zero_point, low, high)  # type: ignore[arg-type]
        return _fake_quantize_per_channel_group(
            x, self.scale, self.zero_point, low, high, self._group_size(x), c.zero_point_domain  # type: ignore[arg-type]
        )  # fmt: skip

    def _group_size(self, x: Tensor) -> int:
        return self.config.group_size if isinstance(self.config.granularity, PerGroup) else x.shape[-1]

    def _choose(self, x: Tensor) -> None:
        """Compute scale and zero point from x."""
        c = self.config
        if isinstance(c.granularity, PerToken):
            low, high = _DTYPE_TO_QVALUE_BOUNDS[c.dtype]
            mapping = MappingType.SYMMETRIC if c.is_symmetric else MappingType.ASYMMETRIC
            self.scale, self.zero_point = choose_qparams_affine(
                x, mapping, _get_per_token_block_size(x), c.dtype, low, high, c.eps, c.scale_precision,
                c.zero_point_precision,
            )  # fmt: skip
        else:
            choose = get_group_qparams_symmetric if c.is_symmetric else get_groupwise_affine_qparams
            with torch.no_grad():
                self.scale, zero_point = choose(
                    x, _DTYPE_TO_BIT_WIDTH[c.dtype], self._group_size(x), c.scale_precision, eps=c.eps
                )
            self.zero_point = zero_point.to(c.zero_point_precision)
        if c.range_learning:
            self._learn_range()

    def _learn_range(self) -> None:
        """Make the scale, and an asymmetric zero point, parameters."""
        assert self.scale is not None
        assert self.zero_point is not None
        if isinstance(self.scale, nn.Parameter) or isinstance(self.zero_point, nn.Parameter):
            return
        scale, zero_point = self.scale.clamp(min=self._scale_eps), self.zero_point
        self.scale = nn.Parameter(scale)
        if self.config.is_symmetric:
            self.zero_point.zero_()
            return
        low, high = _DTYPE_TO_QVALUE_BOUNDS[self.config.dtype]
        self.zero_point = nn.Parameter(zero_point.round().clamp(low, high))


class FakeQuantizer(IntxFakeQuantizer, metaclass=AnyOfBase):
    """The name of :class:`IntxFakeQuantizer` before 0.13; warns when called. Instances of either are of both."""

    def __init__(self, config: IntxFakeQuantizeConfig) -> None:
        super().__init__(config)
        _log_deprecation_warning(self)


_QUANTIZERS: dict[type, type[FakeQuantizerBase]] = {
    IntxFakeQuantizeConfig: IntxFakeQuantizer,
    Int4WeightFakeQuantizeConfig: Int4WeightFakeQuantizer,
    Float8FakeQuantizeConfig: Float8FakeQuantizer,
}
