"""Configs under the field's names. Each is a frozen dataclass whose body is the Scheme it stands for.

Fields that torchao has and that mean nothing here (``set_inductor_config``, ``version``, packing formats) are accepted,
so that code written for it runs; layouts are chosen by the kernel table, and no process-wide setting is ever changed.
Rounding and scales follow torchao's formulas bit for bit, checked against golden files.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch

from ..core.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    INT8,
    TERNARY,
    UINT4,
    Format,
    get_format,
)
from ..core.spec import NF4_BLOCK, NF4_DOUBLE, NVFP4, ActivationSpec, QuantSpec
from .granularity import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerTensor, PerToken
from .scheme import Scheme
from .sites import Site

# torchao gives its 8-bit integer paths this floor of the scale, whatever the dtype of the weight.
INT8_EPS = torch.finfo(torch.float32).eps
TINYGEMM_EPS = 1e-6

_FLOAT_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


def as_format(dtype: torch.dtype | Format | str) -> Format:
    """A number format from torch's dtype (torch.int4, torch.float8_e4m3fn), a name, or itself. ValueError if unknown."""
    if isinstance(dtype, Format):
        return dtype
    if isinstance(dtype, torch.dtype):
        if dtype in _FLOAT_FORMATS:
            return _FLOAT_FORMATS[dtype]
        dtype = str(dtype).removeprefix("torch.")
    return get_format(dtype)


class AOBaseConfig(abc.ABC):
    """Base of configs. A built-in says what a site becomes (:meth:`scheme`); one of your own may instead have a
    handler, see :func:`pennyweight.register_quantize_module_handler`."""

    def __str__(self) -> str:
        """The call that makes this config, without the fields at their defaults."""
        given = []
        for f in fields(self) if is_dataclass(self) else ():
            value = getattr(self, f.name)
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            if value != default:
                given.append(f"{f.name}={value}")
        return f"{type(self).__name__}({', '.join(given)})"

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        """The scheme of a site. Raises ValueError, naming it, where it cannot be."""
        raise NotImplementedError(
            f"{type(self).__name__} has neither scheme() nor a handler; "
            "decorate one with @register_quantize_module_handler"
        )


def _activation(
    fmt: Format, site: Site, granularity: Granularity, mapping: MappingType, *, mode: str = "dynamic", eps: float | None
) -> ActivationSpec:
    if mapping is MappingType.SYMMETRIC_NO_CLIPPING_ERR:
        raise ValueError("activations map SYMMETRIC or ASYMMETRIC")
    asymmetric = mapping is MappingType.ASYMMETRIC
    spec = QuantSpec(fmt, site.activation_block(granularity), zero_point=asymmetric)
    return ActivationSpec(spec, mode, None, eps)


@dataclass(frozen=True)
class Int8WeightOnlyConfig(AOBaseConfig):
    """int8 weights, symmetric, one float32 scale per output channel (or per tensor, or per group)."""

    group_size: int | None = None
    granularity: Granularity = field(default_factory=PerRow)
    set_inductor_config: bool = True
    version: int = 2

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity = self.granularity if self.group_size is None else PerGroup(self.group_size)
        return Scheme(QuantSpec(INT8, site.block(granularity, on_indivisible)), rule="symmetric", eps=INT8_EPS)


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(AOBaseConfig):
    """int8 weights and int8 activations whose scale is taken per token at each call. ``reduce_range``: 7 bits each,
    for CPUs whose int8 products saturate. ``weight_only_decode`` is torchao's and is refused: a batch of one row
    would be rounded differently from the same row in a batch."""

    act_mapping_type: MappingType = MappingType.SYMMETRIC
    weight_only_decode: bool = False
    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool = False

    def __post_init__(self) -> None:
        if self.weight_only_decode:
            raise ValueError(
                "weight_only_decode=True makes results depend on the batch size; use Int8WeightOnlyConfig()"
            )

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        fmt = get_format("int7") if self.reduce_range else INT8
        act_granularity, w_granularity = _pair(self.granularity)
        act = _activation(fmt, site, act_granularity, self.act_mapping_type, eps=INT8_EPS)
        return Scheme(QuantSpec(fmt, site.block(w_granularity, on_indivisible)), act, "symmetric", INT8_EPS)


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(AOBaseConfig):
    """int8 weights and int8 activations with a scale fixed in advance: one number for the whole input.

    act_quant_scale, act_quant_zero_point: a number or a tensor of one element.
    """

    act_quant_scale: Any = None
    act_quant_zero_point: Any = None
    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    act_mapping_type: MappingType = MappingType.SYMMETRIC
    set_inductor_config: bool = True
    version: int = 1
    reduce_range: bool = False

    def __post_init__(self) -> None:
        for name in ("act_quant_scale", "act_quant_zero_point"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(f"{name} must be one number for the whole input, got shape {tuple(value.shape)}")
                object.__setattr__(self, name, value.item())
        if self.act_quant_scale is None or not self.act_quant_scale > 0:
            raise ValueError(
                f"act_quant_scale must be a positive number, got {self.act_quant_scale}; calibrate for one"
            )
        if self.act_mapping_type is MappingType.ASYMMETRIC and self.act_quant_zero_point is None:
            raise ValueError("an ASYMMETRIC static activation needs act_quant_zero_point")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        fmt = get_format("int7") if self.reduce_range else INT8
        act = _activation(fmt, site, PerTensor(), self.act_mapping_type, mode="static", eps=INT8_EPS)
        weight = QuantSpec(fmt, site.block(_pair(self.granularity)[1], on_indivisible))
        zero = None if self.act_mapping_type is MappingType.SYMMETRIC else int(self.act_quant_zero_point)
        return Scheme(weight, act, "symmetric", INT8_EPS, float(self.act_quant_scale), zero)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(AOBaseConfig):
    """4-bit weights in groups, each with a scale and a real offset (tinygemm's numbers); parts in the weight's dtype."""

    group_size: int = 128
    set_inductor_config: bool = True
    int4_packing_format: Any = "plain"
    int4_choose_qparams_algorithm: Any = "tinygemm"
    int4_tile_packed_ntile: int = 8
    version: int = 2

    def __post_init__(self) -> None:
        PerGroup(self.group_size)
        name = str(getattr(self.int4_choose_qparams_algorithm, "value", self.int4_choose_qparams_algorithm)).lower()
        if name != "tinygemm":
            raise ValueError(f"int4_choose_qparams_algorithm {name!r} is not offered yet; use 'tinygemm'")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.group_size), on_indivisible)
        spec = QuantSpec(UINT4, block, scale=site.dtype, offset=site.dtype, mid=8)
        return Scheme(spec, rule="minmax", eps=TINYGEMM_EPS)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(AOBaseConfig):
    """int1 to int8 weights per output channel or per group; scales in the weight's dtype, or rounded to another."""

    weight_dtype: torch.dtype | Format | str = torch.int8
    granularity: Granularity = field(default_factory=lambda: PerAxis(0))
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale_dtype: torch.dtype | None = None
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2

    def __post_init__(self) -> None:
        _signed_int(type(self).__name__, self.weight_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(
            _intx(self.weight_dtype, self.granularity, self.mapping_type, self.scale_dtype, site, on_indivisible),
            rule=self.mapping_type.value,
        )


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(AOBaseConfig):
    """int1 to int8 weights in groups under int8 activations quantized per token ("8da4w" with int4)."""

    weight_dtype: torch.dtype | Format | str = torch.int8
    weight_granularity: Granularity = field(default_factory=lambda: PerGroup(32))
    weight_mapping_type: MappingType = MappingType.SYMMETRIC
    weight_scale_dtype: torch.dtype | None = None
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2

    def __post_init__(self) -> None:
        _signed_int(type(self).__name__, self.weight_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = _activation(INT8, site, PerToken(), self.act_mapping_type, eps=INT8_EPS)
        weight = _intx(
            self.weight_dtype, self.weight_granularity, self.weight_mapping_type, self.weight_scale_dtype, site,
            on_indivisible,
        )  # fmt: skip
        return Scheme(weight, act, self.weight_mapping_type.value)


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(AOBaseConfig):
    """The founding era's 8da4w: int4 weights in groups of 32 under int8 activations quantized per token."""

    group_size: int = 32
    layout: Any = None
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    set_inductor_config: bool = True

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = _activation(INT8, site, PerToken(), self.act_mapping_type, eps=INT8_EPS)
        weight = _intx("int4", PerGroup(self.group_size), self.mapping_type, torch.float32, site, on_indivisible)
        return Scheme(weight, act, self.mapping_type.value, INT8_EPS)


@dataclass(frozen=True)
class UIntXWeightOnlyConfig(AOBaseConfig):
    """uint1 to uint8 weights in groups, each with a scale and an integer zero point."""

    dtype: torch.dtype | Format | str = torch.uint4
    group_size: int = 64
    pack_dim: int = -1
    use_hqq: bool = False
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        fmt = as_format(self.dtype)
        if fmt.kind != "int" or fmt.lo != 0:
            raise ValueError(f"UIntXWeightOnlyConfig: dtype must be uint1 to uint8, got {fmt}")
        if self.use_hqq:
            raise ValueError("use_hqq=True is not offered yet; leave it False")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.group_size), on_indivisible)
        return Scheme(QuantSpec(as_format(self.dtype), block, site.dtype, True), rule="asymmetric", eps=INT8_EPS)


@dataclass(frozen=True)
class FPXWeightOnlyConfig(AOBaseConfig):
    """Small floats of ``ebits`` exponent and ``mbits`` mantissa bits (3,2 and 2,3 and 2,1), a scale per channel."""

    ebits: int = 3
    mbits: int = 2
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        if (self.ebits, self.mbits) not in _SMALL_FLOATS:
            raise ValueError(f"FPXWeightOnlyConfig: (ebits, mbits) must be one of {sorted(_SMALL_FLOATS)}")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(QuantSpec(_SMALL_FLOATS[self.ebits, self.mbits], site.block(PerRow())))


_SMALL_FLOATS = {(3, 2): E3M2, (2, 3): E2M3, (2, 1): E2M1}


@dataclass(frozen=True)
class Float8WeightOnlyConfig(AOBaseConfig):
    """float8 weights, a float32 scale per output channel."""

    weight_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    set_inductor_config: bool = True
    version: int = 2
    granularity: Granularity | None = None

    def __post_init__(self) -> None:
        _float8(type(self).__name__, self.weight_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(QuantSpec(as_format(self.weight_dtype), site.block(self.granularity or PerRow(), on_indivisible)))


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(AOBaseConfig):
    """float8 weights and activations, scaled per tensor (default) or per row at each call; exact emulation on a CPU."""

    activation_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    granularity: Granularity | tuple[Granularity, Granularity] | None = None
    packing_format: Any = "plain"
    mm_config: Any = None
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = "auto"
    set_inductor_config: bool = True
    version: int = 2

    def __post_init__(self) -> None:
        _float8(type(self).__name__, self.weight_dtype)
        _float8(type(self).__name__, self.activation_dtype)
        if self.activation_value_lb is not None or self.activation_value_ub is not None:
            raise ValueError("activation_value_lb and activation_value_ub are not offered; leave them None")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act_granularity, w_granularity = _pair(self.granularity or PerTensor())
        act = ActivationSpec(QuantSpec(as_format(self.activation_dtype), site.activation_block(act_granularity)))
        return Scheme(QuantSpec(as_format(self.weight_dtype), site.block(w_granularity, on_indivisible)), act)


@dataclass(frozen=True)
class Float8StaticActivationFloat8WeightConfig(AOBaseConfig):
    """float8 weights and activations with one activation scale fixed in advance (a number or a one-element tensor)."""

    scale: Any = None
    activation_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    granularity: Granularity | None = None
    mm_config: Any = None
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        _float8(type(self).__name__, self.weight_dtype)
        _float8(type(self).__name__, self.activation_dtype)
        if isinstance(self.scale, torch.Tensor):
            object.__setattr__(self, "scale", self.scale.item())
        if self.scale is None or not self.scale > 0:
            raise ValueError(f"scale must be a positive number, got {self.scale}; calibrate for one")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = ActivationSpec(QuantSpec(as_format(self.activation_dtype), None), "static")
        weight = QuantSpec(as_format(self.weight_dtype), site.block(self.granularity or PerTensor(), on_indivisible))
        return Scheme(weight, act, act_scale=float(self.scale))


@dataclass(frozen=True)
class Float8DynamicActivationInt4WeightConfig(AOBaseConfig):
    """int4 weights in groups of 128 under float8 activations scaled per row at each call."""

    int4_packing_format: Any = "preshuffled"
    group_size: int = 128

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        weight = _intx("int4", PerGroup(self.group_size), MappingType.SYMMETRIC, None, site, on_indivisible)
        act = ActivationSpec(QuantSpec(E4M3, site.activation_block(PerRow())))
        return Scheme(weight, act, "symmetric")


@dataclass(frozen=True)
class MXWeightOnlyConfig(AOBaseConfig):
    """OCP MX weights: blocks of 32 under a power-of-two scale; e4m3, e5m2, e3m2, e2m3 or e2m1 elements."""

    weight_dtype: torch.dtype | Format | str = torch.float8_e4m3fn
    block_size: int = 32
    scaling_mode: str = "rceil"

    def __post_init__(self) -> None:
        fmt = as_format(self.weight_dtype)
        if fmt.kind != "float" or fmt is E8M0:
            raise ValueError(f"MX elements are e4m3, e5m2, e3m2, e2m3 or e2m1, got {fmt}")
        if self.scaling_mode not in ("floor", "ceil", "even", "rceil"):
            raise ValueError(f"scaling_mode must be floor, ceil, even or rceil, got {self.scaling_mode!r}")

    def _spec(self, block: tuple[int, ...] | None) -> QuantSpec:
        return QuantSpec(as_format(self.weight_dtype), block, QuantSpec(E8M0, (1,), scale=None))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.block_size), on_indivisible)
        return Scheme(self._spec(block), rule=f"mx_{self.scaling_mode}")


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(MXWeightOnlyConfig):
    """OCP MX weights and activations, both in blocks of 32 along the contracted axis; exact emulation on a CPU."""

    activation_dtype: torch.dtype | Format | str = torch.float8_e4m3fn

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        rule = f"mx_{self.scaling_mode}"
        act = QuantSpec(as_format(self.activation_dtype), (self.block_size,), QuantSpec(E8M0, (1,), scale=None))
        block = site.block(PerGroup(self.block_size), on_indivisible)
        return Scheme(self._spec(block), ActivationSpec(act, "dynamic", rule), rule)


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig(AOBaseConfig):
    """e2m1 weights in blocks of 16 under e4m3 scales under one float32 scale."""

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(NVFP4)


@dataclass(frozen=True)
class NF4WeightOnlyConfig(AOBaseConfig):
    """QLoRA's 4-bit normal floats in blocks; ``double_quant`` stores the scales in 8 bits."""

    block_size: int = 64
    double_quant: bool = True

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.block_size), on_indivisible)
        return Scheme((NF4_DOUBLE if self.double_quant else NF4_BLOCK).with_(block=block))


@dataclass(frozen=True)
class SpecConfig(AOBaseConfig):
    """Any scheme at all, as data: ``SpecConfig(QuantSpec(INT4, (32,)))``. The spec is used as it stands."""

    weight: QuantSpec
    act: ActivationSpec | None = None
    rule: str | None = None
    eps: float | None = None

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(self.weight, self.act, self.rule, self.eps)


@dataclass(frozen=True)
class FqnToConfig(AOBaseConfig):
    """Which config for which parameter: exact names first, then patterns in their order; the first match wins.

    Keys name a module or a parameter: exact, a glob (``layers.*.mlp``), or ``re:`` and a regular expression that must
    match the whole name. A value of None leaves it alone. ``_default`` is for the modules that no key names.
    """

    fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, AOBaseConfig | None] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        if self.fqn_to_config and self.module_fqn_to_config and self.fqn_to_config != self.module_fqn_to_config:
            raise ValueError("give fqn_to_config or its older name module_fqn_to_config, not both")
        table = dict(self.fqn_to_config or self.module_fqn_to_config)
        for key, value in table.items():
            if not isinstance(key, str) or not (value is None or isinstance(value, AOBaseConfig)):
                raise ValueError(f"FqnToConfig maps names to configs or None, got {key!r}: {value!r}")
        object.__setattr__(self, "fqn_to_config", table)
        object.__setattr__(self, "module_fqn_to_config", table)

    def __str__(self) -> str:
        return f"FqnToConfig({{{', '.join(f'{k!r}: {v}' for k, v in self.fqn_to_config.items())}}})"


ModuleFqnToConfig = FqnToConfig
AOPerModuleConfig = FqnToConfig


def _pair(granularity: Any) -> tuple[Granularity, Granularity]:
    """(activation, weight) granularity from one or two."""
    return tuple(granularity) if isinstance(granularity, (tuple, list)) else (granularity, granularity)  # type: ignore[return-value]


def _signed_int(owner: str, dtype: torch.dtype | Format | str) -> None:
    fmt = as_format(dtype)
    if fmt.kind != "int" or fmt.lo >= 0 or fmt is TERNARY:
        raise ValueError(f"{owner}: weight_dtype must be int1 to int8, got {fmt}")


def _float8(owner: str, dtype: torch.dtype | Format | str) -> None:
    if as_format(dtype) not in (E4M3, E5M2):
        raise ValueError(f"{owner}: dtypes must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}")


def _intx(
    dtype: Any, granularity: Granularity, mapping: MappingType, scale: torch.dtype | None, site: Site, policy: str
) -> QuantSpec:
    asymmetric = mapping is MappingType.ASYMMETRIC
    return QuantSpec(as_format(dtype), site.block(granularity, policy), scale or site.dtype, zero_point=asymmetric)


# The founding era's spelling: kept for ever.
int8_weight_only = Int8WeightOnlyConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
int8_static_activation_int8_weight = Int8StaticActivationInt8WeightConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int4_weight_only = Int4WeightOnlyConfig
intx_weight_only = IntxWeightOnlyConfig
uintx_weight_only = UIntXWeightOnlyConfig
fpx_weight_only = FPXWeightOnlyConfig
float8_weight_only = Float8WeightOnlyConfig
float8_dynamic_activation_float8_weight = Float8DynamicActivationFloat8WeightConfig
float8_static_activation_float8_weight = Float8StaticActivationFloat8WeightConfig
