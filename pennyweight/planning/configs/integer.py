"""Integer configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.formats import INT7, INT8, UINT4
from ...core.spec import QuantSpec
from ..granularity import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerTensor, PerToken
from ..parameters import Site
from ..scheme import Scheme
from .base import AnyDtype, AOBaseConfig, activation, as_format, intx, number, pair, require_signed_int

# torchao's minimum scale for 8-bit integer paths, whatever the dtype of the weight.
INT8_EPS = torch.finfo(torch.float32).eps
TINYGEMM_EPS = 1e-6


@dataclass(frozen=True)
class Int8WeightOnlyConfig(AOBaseConfig):
    """int8 weights, symmetric, one scale per output channel (or per tensor, or per group)."""

    group_size: int | None = None
    granularity: Granularity = field(default_factory=PerRow)
    set_inductor_config: bool = True
    version: int = 2

    def __post_init__(self) -> None:
        if self.group_size is not None:
            PerGroup(self.group_size)
        pair(self.granularity)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity = self.granularity if self.group_size is None else PerGroup(self.group_size)
        return Scheme(QuantSpec(INT8, site.block(granularity, on_indivisible)), rule="symmetric", eps=INT8_EPS)


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(AOBaseConfig):
    """int8 weights and int8 activations dynamically quantized per token. ``reduce_range``: 7 bits each, for CPUs whose
    int8 products saturate. ``act_group_size``: one activation scale per group of so many columns of a token, in place
    of the activation's granularity. torchao's ``weight_only_decode`` is rejected: a single row would be rounded
    differently from the same row in a batch."""

    act_mapping_type: MappingType = MappingType.SYMMETRIC
    weight_only_decode: bool = False
    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool = False
    act_group_size: int | None = None

    def __post_init__(self) -> None:
        _check_group(self.act_group_size)
        if self.weight_only_decode:
            raise ValueError(
                "weight_only_decode=True makes results depend on the batch size; use Int8WeightOnlyConfig()"
            )
        _settle_granularity(self)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        fmt = INT7 if self.reduce_range else INT8
        act_granularity, w_granularity = pair(self.granularity)
        act_granularity = _of_inputs(site, act_granularity, self.act_group_size)
        act = activation(fmt, site, act_granularity, self.act_mapping_type, eps=INT8_EPS)
        return Scheme(QuantSpec(fmt, site.block(w_granularity, on_indivisible)), act, "symmetric", INT8_EPS)


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(AOBaseConfig):
    """int8 weights and int8 activations with a static scale: one number for the whole input, or one per row of inputs
    that always have that many rows.

    act_quant_scale       a number, a tensor of one element, or of shape [rows, 1] with activations per row
    act_quant_zero_point  a number or a tensor of one element
    """

    act_quant_scale: Any = None
    act_quant_zero_point: Any = None
    granularity: Granularity | tuple[Granularity, Granularity] = field(default_factory=PerRow)
    act_mapping_type: MappingType = MappingType.SYMMETRIC
    set_inductor_config: bool = True
    version: int = 1
    reduce_range: bool = False

    def __post_init__(self) -> None:
        owner = type(self).__name__
        object.__setattr__(self, "act_quant_scale", self._settled_scale())
        zero = self.act_quant_zero_point
        if self.act_mapping_type is MappingType.ASYMMETRIC:
            fmt = INT7 if self.reduce_range else INT8
            zero = zero.item() if isinstance(zero, torch.Tensor) and zero.numel() == 1 else zero
            if not isinstance(zero, int) or not fmt.lo <= zero <= fmt.hi:
                raise ValueError(f"{owner}: an ASYMMETRIC activation needs act_quant_zero_point, one {fmt} value")
            object.__setattr__(self, "act_quant_zero_point", zero)
        elif zero is not None and bool(torch.as_tensor(zero).any()):
            raise ValueError(f"{owner}: act_quant_zero_point needs act_mapping_type=MappingType.ASYMMETRIC")
        else:
            object.__setattr__(self, "act_quant_zero_point", None)
        _settle_granularity(self)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        fmt = INT7 if self.reduce_range else INT8
        scale = self.act_quant_scale
        act_granularity = PerRow() if isinstance(scale, tuple) else PerTensor()
        act = activation(fmt, site, act_granularity, self.act_mapping_type, mode="static", eps=INT8_EPS)
        weight = QuantSpec(fmt, site.block(pair(self.granularity)[1], on_indivisible))
        scale = scale if isinstance(scale, tuple) else float(scale)
        return Scheme(weight, act, "symmetric", INT8_EPS, scale, self.act_quant_zero_point)

    def _settled_scale(self) -> float | tuple[float, ...]:
        """One positive number, or one per row."""
        owner, scale = type(self).__name__, self.act_quant_scale
        rows = isinstance(scale, torch.Tensor) and scale.ndim == 2 and scale.shape[0] > 1 and scale.shape[1] == 1
        if not rows and not (isinstance(scale, (tuple, list)) and len(scale) > 1):
            found: float = number(owner, "act_quant_scale", scale)
            return found
        if not isinstance(pair(self.granularity)[0], PerRow):
            raise ValueError(
                f"{owner}: act_quant_scale has one value per row, and activations have "
                f"{pair(self.granularity)[0]}; pass granularity=PerRow()"
            )
        values = scale.flatten().tolist() if isinstance(scale, torch.Tensor) else scale
        return tuple(float(number(owner, "act_quant_scale", value)) for value in values)


@dataclass(frozen=True)
class Int4WeightOnlyConfig(AOBaseConfig):
    """4-bit weights in groups, each with a scale and a float offset in the weight's dtype (tinygemm's formula).

    int4_choose_qparams_algorithm  "tinygemm": from the range; "hqq": offsets by half-quadratic quantization
    """

    group_size: int = 128
    set_inductor_config: bool = True
    int4_packing_format: Any = "plain"
    int4_choose_qparams_algorithm: Any = "tinygemm"
    int4_tile_packed_ntile: int = 8
    version: int = 2

    def __post_init__(self) -> None:
        PerGroup(self.group_size)
        _chooser("int4_choose_qparams_algorithm", self.int4_choose_qparams_algorithm, ("tinygemm", "hqq"))

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.group_size), on_indivisible)
        spec = QuantSpec(UINT4, block, scale=site.dtype, offset=site.dtype, mid=8)
        name = _chooser("int4_choose_qparams_algorithm", self.int4_choose_qparams_algorithm, ("tinygemm", "hqq"))
        return Scheme(spec, rule="minmax", eps=TINYGEMM_EPS, solver="hqq" if name == "hqq" else "")


@dataclass(frozen=True)
class IntxWeightOnlyConfig(AOBaseConfig):
    """int1 to int8 weights per output channel or per group; scales in the weight's dtype or in ``scale_dtype``.

    intx_choose_qparams_algorithm  "affine": scales from the range; "hqq_scale_only": those with the least squared error
                                   of each block, found by search (rule "mse")
    """

    weight_dtype: AnyDtype = torch.int8
    granularity: Granularity = field(default_factory=lambda: PerAxis(0))
    mapping_type: MappingType = MappingType.SYMMETRIC
    scale_dtype: torch.dtype | None = None
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2

    def __post_init__(self) -> None:
        require_signed_int(type(self).__name__, self.weight_dtype)
        _intx_rule(self)
        pair(self.granularity)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(
            intx(self.weight_dtype, self.granularity, self.mapping_type, self.scale_dtype, site, on_indivisible),
            rule=_intx_rule(self) or self.mapping_type.rule,
        )


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(AOBaseConfig):
    """int1 to int8 weights in groups, int8 activations dynamically quantized per token ("8da4w" with int4); all scales
    in the weight's dtype. ``act_group_size``: one activation scale per group of so many columns of a token."""

    weight_dtype: AnyDtype = torch.int8
    weight_granularity: Granularity = field(default_factory=lambda: PerGroup(32))
    weight_mapping_type: MappingType = MappingType.SYMMETRIC
    weight_scale_dtype: torch.dtype | None = None
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2
    act_group_size: int | None = None

    def __post_init__(self) -> None:
        _check_group(self.act_group_size)
        require_signed_int(type(self).__name__, self.weight_dtype)
        _intx_rule(self)
        pair(self.weight_granularity)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act_granularity = _of_inputs(site, PerToken(), self.act_group_size)
        act = activation(INT8, site, act_granularity, self.act_mapping_type, scale=site.dtype)
        weight = intx(
            self.weight_dtype, self.weight_granularity, self.weight_mapping_type, self.weight_scale_dtype, site,
            on_indivisible,
        )  # fmt: skip
        return Scheme(weight, act, _intx_rule(self) or self.weight_mapping_type.rule)


@dataclass(frozen=True)
class Int8DynamicActivationInt4WeightConfig(AOBaseConfig):
    """torchao's older 8da4w: int4 weights in groups of 32, int8 activations dynamically quantized per token.
    ``act_group_size``: one activation scale per group of so many columns of a token."""

    group_size: int = 32
    layout: Any = None
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.ASYMMETRIC
    set_inductor_config: bool = True
    act_group_size: int | None = None

    def __post_init__(self) -> None:
        PerGroup(self.group_size)
        _check_group(self.act_group_size)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act_granularity = _of_inputs(site, PerToken(), self.act_group_size)
        act = activation(INT8, site, act_granularity, self.act_mapping_type, eps=INT8_EPS)
        weight = intx("int4", PerGroup(self.group_size), self.mapping_type, torch.float32, site, on_indivisible)
        return Scheme(weight, act, self.mapping_type.rule, INT8_EPS)


@dataclass(frozen=True)
class UIntXWeightOnlyConfig(AOBaseConfig):
    """uint1 to uint8 weights in groups, each with a scale and an integer zero point of the same format; scales in the
    weight's dtype or in ``scale_dtype``.

    use_hqq  a float offset instead of the zero point, chosen by half-quadratic quantization
    """

    dtype: AnyDtype = "uint4"
    group_size: int = 64
    pack_dim: int = -1
    use_hqq: bool = False
    set_inductor_config: bool = True
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        PerGroup(self.group_size)
        fmt = as_format(self.dtype, "UIntXWeightOnlyConfig: dtype")
        if fmt.kind != "int" or fmt.lo != 0:
            raise ValueError(f"UIntXWeightOnlyConfig: dtype must be uint1 to uint8, got {fmt}")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        block = site.block(PerGroup(self.group_size), on_indivisible)
        fmt = as_format(self.dtype)
        scale = self.scale_dtype or site.dtype
        if self.use_hqq:
            spec = QuantSpec(fmt, block, scale, offset=scale, mid=(int(fmt.hi) + 1) // 2)
            return Scheme(spec, rule="minmax", eps=TINYGEMM_EPS, solver="hqq")
        return Scheme(QuantSpec(fmt, block, scale, zero_point=fmt), rule="asymmetric", eps=INT8_EPS)


def _settle_granularity(config: Any) -> None:
    """Check the granularity, and convert a list to a tuple so that the config is hashable."""
    pair(config.granularity)
    if isinstance(config.granularity, list):
        object.__setattr__(config, "granularity", tuple(config.granularity))


def _check_group(size: Any) -> None:
    """Raise ValueError unless ``act_group_size`` is None or a positive integer."""
    if size is not None:
        PerGroup(size)


def _of_inputs(site: Site, granularity: Granularity, size: int | None) -> Granularity:
    """The granularity of a site's dynamic input: groups of ``size`` columns if given. A group that is not smaller than
    the input is a token. Raises ValueError for groups of a convolution's input."""
    if size is not None:
        granularity = PerGroup(size)
    if not isinstance(granularity, PerGroup):
        return granularity
    if site.op in ("convolution", "transposed_convolution"):
        each = "sample" if site.op == "convolution" else "position"
        raise ValueError(
            f"{site.name}: the input of a {site.op.replace('_', ' ')} has one scale per {each}, not groups of "
            f"{granularity.group_size} columns; leave act_group_size out for it"
        )
    return PerToken() if granularity.group_size >= site.shape[-1] else granularity


def _chooser(field: str, value: Any, known: tuple[str, ...]) -> str:
    """Name of an algorithm that chooses qparams, or torchao's enum of it. Raises ValueError for an unknown one."""
    name = str(getattr(value, "value", value)).lower()
    if name not in known:
        raise ValueError(f"{field} must be one of {', '.join(map(repr, known))}, got {name!r}")
    return name


def _intx_rule(config: Any) -> str:
    """ "mse" if the config asks for scales that minimise the squared error, else ""."""
    name = _chooser("intx_choose_qparams_algorithm", config.intx_choose_qparams_algorithm, ("affine", "hqq_scale_only"))
    return "" if name == "affine" else "mse"


# Names of torchao before 0.10; kept for compatibility.
int8_weight_only = Int8WeightOnlyConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
int8_static_activation_int8_weight = Int8StaticActivationInt8WeightConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int4_weight_only = Int4WeightOnlyConfig
intx_weight_only = IntxWeightOnlyConfig
uintx_weight_only = UIntXWeightOnlyConfig
