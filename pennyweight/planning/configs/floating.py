"""Configs with floating-point and lookup-table formats; the tables are fixed, or learned from each weight."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from ...core.formats import E2M1, E2M2, E2M3, E3M1, E3M2, E4M3, E8M0, learned
from ...core.spec import NF4_BLOCK, NF4_DOUBLE, NVFP4, ActivationSpec, QuantSpec
from ..granularity import Granularity, MappingType, PerGroup, PerRow, PerTensor
from ..parameters import Site
from ..scheme import Scheme
from .base import AnyDtype, AOBaseConfig, as_format, intx, number, pair, require_float8

_SMALL_FLOATS = {(3, 2): E3M2, (2, 3): E2M3, (3, 1): E3M1, (2, 2): E2M2, (2, 1): E2M1}
_MX_SCALE = QuantSpec(E8M0, (1,), scale=None)


@dataclass(frozen=True)
class FPXWeightOnlyConfig(AOBaseConfig):
    """Small floats with ``ebits`` exponent and ``mbits`` mantissa bits, one scale per channel: (3, 2), (2, 3), (3, 1),
    (2, 2) or (2, 1)."""

    ebits: int = 3
    mbits: int = 2
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        if (self.ebits, self.mbits) not in _SMALL_FLOATS:
            raise ValueError(f"FPXWeightOnlyConfig: (ebits, mbits) must be one of {sorted(_SMALL_FLOATS)}")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(QuantSpec(_SMALL_FLOATS[self.ebits, self.mbits], site.block(PerRow())))


@dataclass(frozen=True)
class Float8WeightOnlyConfig(AOBaseConfig):
    """float8 weights, a float32 scale per output channel."""

    weight_dtype: AnyDtype = torch.float8_e4m3fn
    set_inductor_config: bool = True
    version: int = 2
    granularity: Granularity | None = field(default_factory=PerRow)

    def __post_init__(self) -> None:
        require_float8(type(self).__name__, self.weight_dtype)
        pair(self.granularity or PerRow())

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(QuantSpec(as_format(self.weight_dtype), site.block(self.granularity or PerRow(), on_indivisible)))


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(AOBaseConfig):
    """float8 weights and activations, dynamically scaled per tensor (default) or per row; exact emulation on a CPU."""

    activation_dtype: AnyDtype = torch.float8_e4m3fn
    weight_dtype: AnyDtype = torch.float8_e4m3fn
    granularity: Granularity | tuple[Granularity, Granularity] | None = None
    packing_format: Any = "plain"
    mm_config: Any = None
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = "auto"
    set_inductor_config: bool = True
    version: int = 2

    def __post_init__(self) -> None:
        require_float8(type(self).__name__, self.weight_dtype, self.activation_dtype)
        pair(self.granularity or PerTensor())
        if isinstance(self.granularity, list):
            object.__setattr__(self, "granularity", tuple(self.granularity))
        if self.activation_value_lb is not None or self.activation_value_ub is not None:
            raise ValueError("activation_value_lb and activation_value_ub are not supported; leave them None")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act_granularity, w_granularity = pair(self.granularity or PerTensor())
        act = ActivationSpec(QuantSpec(as_format(self.activation_dtype), site.activation_block(act_granularity)))
        return Scheme(QuantSpec(as_format(self.weight_dtype), site.block(w_granularity, on_indivisible)), act)


@dataclass(frozen=True)
class Float8StaticActivationFloat8WeightConfig(AOBaseConfig):
    """float8 weights and activations with one static activation scale (a number or a one-element tensor)."""

    scale: Any = None
    activation_dtype: AnyDtype = torch.float8_e4m3fn
    weight_dtype: AnyDtype = torch.float8_e4m3fn
    granularity: Granularity | None = None
    mm_config: Any = None
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        require_float8(type(self).__name__, self.weight_dtype, self.activation_dtype)
        pair(self.granularity or PerTensor())
        object.__setattr__(self, "scale", number(type(self).__name__, "scale", self.scale))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = ActivationSpec(QuantSpec(as_format(self.activation_dtype), None), "static")
        weight = QuantSpec(as_format(self.weight_dtype), site.block(self.granularity or PerTensor(), on_indivisible))
        return Scheme(weight, act, act_scale=float(self.scale))


@dataclass(frozen=True)
class Float8DynamicActivationInt4WeightConfig(AOBaseConfig):
    """int4 weights in groups of 128, float8 activations dynamically scaled per row."""

    int4_packing_format: Any = "preshuffled"
    group_size: int = 128

    def __post_init__(self) -> None:
        PerGroup(self.group_size)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        weight = intx("int4", PerGroup(self.group_size), MappingType.SYMMETRIC, None, site, on_indivisible)
        act = ActivationSpec(QuantSpec(E4M3, site.activation_block(PerRow())))
        return Scheme(weight, act, "symmetric")


def _settle_mx(config: Any, *dtypes: AnyDtype) -> None:
    owner = type(config).__name__
    for dtype in dtypes:
        if as_format(dtype).kind != "float" or as_format(dtype) is E8M0:
            raise ValueError(f"{owner}: MX elements must be e4m3, e5m2, e3m2, e2m3 or e2m1, got {dtype}")
    try:
        PerGroup(config.block_size)
    except ValueError as error:
        raise ValueError(
            f"{owner}: block_size must be a positive number of elements, got {config.block_size!r}; pass formats as "
            + " and ".join(("weight_dtype", "activation_dtype")[: len(dtypes)])
        ) from error
    mode = str(getattr(config.scaling_mode, "value", config.scaling_mode)).lower()
    if mode not in ("floor", "ceil", "even", "rceil"):
        raise ValueError(f"{owner}: scaling_mode must be floor, ceil, even or rceil, got {config.scaling_mode!r}")
    object.__setattr__(config, "scaling_mode", mode)


@dataclass(frozen=True)
class MXWeightOnlyConfig(AOBaseConfig):
    """OCP MX weights: blocks of 32 with a power-of-two scale; e4m3, e5m2, e3m2, e2m3 or e2m1 elements."""

    weight_dtype: AnyDtype = torch.float8_e4m3fn
    block_size: int = 32
    scaling_mode: Any = "rceil"

    def __post_init__(self) -> None:
        _settle_mx(self, self.weight_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.standard_block(self.block_size, on_indivisible)
        return Scheme(QuantSpec(as_format(self.weight_dtype), block, _MX_SCALE), rule=f"mx_{self.scaling_mode}")


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(AOBaseConfig):
    """OCP MX weights and activations, both in blocks of 32 along the contracted axis; exact emulation on a CPU."""

    block_size: int = 32
    activation_dtype: AnyDtype = torch.float8_e4m3fn
    weight_dtype: AnyDtype = torch.float8_e4m3fn
    kernel_preference: Any = "auto"
    scaling_mode: Any = "rceil"

    def __post_init__(self) -> None:
        _settle_mx(self, self.weight_dtype, self.activation_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        rule, group = f"mx_{self.scaling_mode}", PerGroup(self.block_size)
        act = QuantSpec(as_format(self.activation_dtype), site.activation_block(group), _MX_SCALE)
        weight = QuantSpec(
            as_format(self.weight_dtype), site.standard_block(self.block_size, on_indivisible), _MX_SCALE
        )
        return Scheme(weight, ActivationSpec(act, "dynamic", rule), rule)


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig(AOBaseConfig):
    """e2m1 weights in blocks of 16 with e4m3 scales and, unless disabled, one float32 scale per tensor."""

    use_dynamic_per_tensor_scale: bool = True

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.standard_block(16, on_indivisible)
        scale = NVFP4.scale if self.use_dynamic_per_tensor_scale else QuantSpec(E4M3, (1,), scale=None)
        return Scheme(NVFP4.with_(block=block, scale=scale))


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(AOBaseConfig):
    """NVFP4 weights and activations: e2m1 in blocks of 16 along the contracted axis, e4m3 scales and, unless disabled,
    one float32 scale per tensor; exact emulation on a CPU.

    act_scale  the float32 scale of every input, instead of one chosen per call: largest input / (6 * 448)
    """

    use_triton_kernel: bool = True
    use_dynamic_per_tensor_scale: bool = True
    _: KW_ONLY
    act_scale: Any = None

    def __post_init__(self) -> None:
        if self.act_scale is not None:
            object.__setattr__(self, "act_scale", number(type(self).__name__, "act_scale", self.act_scale))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        weight = NVFP4WeightOnlyConfig(self.use_dynamic_per_tensor_scale or self.act_scale is not None)
        found = weight.scheme(site, on_indivisible)
        spec = found.weight.with_(block=site.activation_block(PerGroup(16)))
        if self.act_scale is None:
            return Scheme(found.weight, ActivationSpec(spec))
        return Scheme(found.weight, ActivationSpec(spec, "static"), act_scale=float(self.act_scale))


@dataclass(frozen=True)
class NF4WeightOnlyConfig(AOBaseConfig):
    """NF4 (QLoRA) in blocks; ``double_quant`` stores the scales in 8 bits, in blocks of ``scaler_block_size``."""

    block_size: int = 64
    scaler_block_size: int = 256
    double_quant: bool = True

    def __post_init__(self) -> None:
        PerGroup(self.block_size)
        PerGroup(self.scaler_block_size)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.block_size), on_indivisible)
        if not self.double_quant:
            return Scheme(NF4_BLOCK.with_(block=block))
        scale = NF4_DOUBLE.scale
        assert isinstance(scale, QuantSpec)
        return Scheme(NF4_DOUBLE.with_(block=block, scale=scale.with_(block=site.along_inputs(self.scaler_block_size))))


# Names of torchao before 0.10; kept for compatibility.
fpx_weight_only = FPXWeightOnlyConfig
float8_weight_only = Float8WeightOnlyConfig
float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
float8_static_activation_float8_weight = Float8StaticActivationFloat8WeightConfig


@dataclass(frozen=True)
class CodebookWeightOnlyConfig(AOBaseConfig):
    """Vector quantization: one codebook per weight tensor, one code per ``dim`` neighbours of a row, ``bits`` bits per
    weight.

    bits, dim   a code has bits * dim bits, 8 at most: 2 bits with dim 4, 3 or 4 with dim 2, 1 to 8 with dim 1
    group_size  weights that share a scale; None: a row
    The codebook takes 2 * dim * 2**(bits * dim) bytes per weight tensor. With calibration "kmeans" finds its entries.
    """

    bits: int = 2
    dim: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits * self.dim <= 8:
            raise ValueError(f"CodebookWeightOnlyConfig: bits * dim must be 1 to 8, got {self.bits} * {self.dim}")
        learned(self.bits * self.dim, self.dim)
        if self.group_size is not None:
            PerGroup(self.group_size)
            if self.group_size % self.dim:
                raise ValueError(
                    f"CodebookWeightOnlyConfig: group_size {self.group_size} is not divisible by dim {self.dim}"
                )

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity = PerRow() if self.group_size is None else PerGroup(self.group_size)
        fmt = learned(self.bits * self.dim, self.dim)
        return Scheme(QuantSpec(fmt, site.block(granularity, on_indivisible), site.dtype))
