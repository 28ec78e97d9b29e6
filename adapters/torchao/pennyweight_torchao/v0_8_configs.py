"""Configs with the fields of all torchao releases: ours, plus legacy arguments.

A ``layout`` requests a kernel. Here the kernel table selects it. A layout of 2:4 sparse weights also has them pruned,
by magnitude, before they are quantized; they are stored dense, with their zeros. ``use_hqq`` selects our solver "hqq",
whose offsets are not bit-equal to torchao's.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import torch

from pennyweight.core.formats import INT4, INT8, UINT4
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning import configs as ours
from pennyweight.planning.configs.base import activation, as_format, number, pair, require_float8
from pennyweight.planning.configs.integer import INT8_EPS
from pennyweight.planning.granularity import Granularity, MappingType, PerGroup, PerRow, PerToken
from pennyweight.planning.parameters import Site
from pennyweight.planning.scheme import Scheme

from .enums import (
    Int4ChooseQParamsAlgorithm,
    Int4PackingFormat,
    IntxChooseQParamsAlgorithm,
    IntxPackingFormat,
    ZeroPointDomain,
)
from .int8_float8_views import QuantizeTensorToInt8Kwargs
from .v0_8_layouts import CutlassSemiSparseLayout, Layout, MarlinSparseLayout, SemiSparseLayout

__all__ = [
    "AOPerModuleConfig", "Float8DynamicActivationFloat8SemiSparseWeightConfig", "GemliteUIntXWeightOnlyConfig",
    "Int4DynamicActivationInt4WeightConfig", "Int4WeightOnlyConfig", "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig", "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig", "IntxWeightOnlyConfig", "ModuleFqnToConfig",
    "PrototypeInt4WeightOnlyConfig", "gemlite_uintx_weight_only", "int4_dynamic_activation_int4_weight",
    "int4_weight_only", "int8_dynamic_activation_int4_weight", "int8_dynamic_activation_int8_semi_sparse_weight",
    "int8_dynamic_activation_int8_weight", "intx_weight_only",
]  # fmt: skip


def _check_layout(owner: Any, layout: Any) -> None:
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise ValueError(f"{type(owner).__name__}: layout must be a Layout such as PlainLayout(), got {layout!r}")


def _prune(owner: Any, found: Scheme, site: Site) -> Scheme:
    """The scheme, pruned as the layout of its config asks. Raises ValueError if the pattern does not divide the row."""
    pattern = getattr(owner.layout, "sparsity", "")
    if not pattern:
        return found
    if site.shape[-1] % 4:
        raise ValueError(f"{site.name}: {pattern} sparsity needs rows of a multiple of 4 inputs, not {site.shape[-1]}")
    stored_dense(type(owner).__name__)
    return replace(found, sparsity=pattern)


@functools.cache
def stored_dense(owner: str) -> None:
    """Warn, once for each name, that sparse weights take as much memory and time as dense ones."""
    warnings.warn(
        f"{owner}: weights are pruned 2:4 and stored dense, with their zeros; only some GPUs multiply them faster",
        UserWarning, stacklevel=2,
    )  # fmt: skip


class _CurrentRepr:
    """repr with the fields of the current release, and others that are not at their default."""

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.repr or value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class _WithLayout(_CurrentRepr):
    """Mixin that adds a layout; must precede our config in the bases."""

    _: KW_ONLY
    layout: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        _check_layout(self, self.layout)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return _prune(self, super().scheme(site, on_indivisible), site)  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Int4WeightOnlyConfig(_CurrentRepr, ours.Int4WeightOnlyConfig):
    """4-bit weights in groups. ``zero_point_domain``: FLOAT (tinygemm's numbers; also what None and NONE mean), or INT:
    integer zero points, with ``preserve_zero`` as is usual for those."""

    int4_packing_format: Any = Int4PackingFormat.PLAIN
    int4_choose_qparams_algorithm: Any = Int4ChooseQParamsAlgorithm.TINYGEMM
    _: KW_ONLY
    layout: Any = field(default=None, repr=False)
    use_hqq: bool = field(default=False, repr=False)
    zero_point_domain: Any = field(default=None, repr=False)
    preserve_zero: bool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.set_inductor_config, Layout):  # the second argument in 0.8
            object.__setattr__(self, "layout", self.set_inductor_config)
            object.__setattr__(self, "set_inductor_config", True)
        super().__post_init__()
        _check_layout(self, self.layout)
        if self.use_hqq and self.zero_point_domain is ZeroPointDomain.INT:
            raise ValueError("Int4WeightOnlyConfig: use_hqq=True needs zero_point_domain FLOAT")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        if isinstance(self.layout, MarlinSparseLayout):
            granularity = PerRow() if self.group_size >= site.shape[-1] else PerGroup(self.group_size)
            spec = QuantSpec(UINT4, site.block(granularity, on_indivisible), site.dtype, mid=8)
            return _prune(self, Scheme(spec, rule="symmetric", eps=1e-6), site)
        if self.zero_point_domain is not ZeroPointDomain.INT:
            found = super().scheme(site, on_indivisible)
            return replace(found, solver="hqq") if self.use_hqq else found
        spec = QuantSpec(UINT4, site.block(PerGroup(self.group_size), on_indivisible), site.dtype, True)
        return Scheme(spec, rule="asymmetric", eps=1e-6)


@dataclass(frozen=True, repr=False)
class Int8DynamicActivationInt8WeightConfig(_WithLayout, ours.Int8DynamicActivationInt8WeightConfig):
    """Like ours, with ``layout``."""

    act_group_size: int | None = field(default=None, repr=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Layout):  # the first argument in 0.8
            args, kwargs = args[1:], {**kwargs, "layout": args[0]}
        return super().__new__(cls, *args, **kwargs)

    def __post_init__(self) -> None:
        if isinstance(self.act_mapping_type, Layout):
            object.__setattr__(self, "layout", self.act_mapping_type)
            object.__setattr__(self, "act_mapping_type", MappingType.SYMMETRIC)
        super().__post_init__()


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(ours.Int8StaticActivationInt8WeightConfig):
    """Like ours. Without ``act_quant_scale`` it is the base of a config that finds it, such as SmoothQuantConfig; to
    quantize with it raises ValueError."""

    def __post_init__(self) -> None:
        if self.act_quant_scale is None and self.act_quant_zero_point is None:
            with_one = replace(self, act_quant_scale=1.0, act_quant_zero_point=self._any_zero_point())
            object.__setattr__(self, "granularity", with_one.granularity)
        else:
            super().__post_init__()

    def _any_zero_point(self) -> int | None:
        return 0 if self.act_mapping_type is MappingType.ASYMMETRIC else None

    def get_act_quant_kwargs(self) -> QuantizeTensorToInt8Kwargs:
        """How the activation is quantized, without its scale."""
        return QuantizeTensorToInt8Kwargs(pair(self.granularity)[0], self.act_mapping_type, self.reduce_range)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        if self.act_quant_scale is None:
            number(type(self).__name__, "act_quant_scale", None)  # raises, with the remedy
        return super().scheme(site, on_indivisible)


@dataclass(frozen=True, repr=False)
class Int8DynamicActivationInt4WeightConfig(_CurrentRepr, ours.Int8DynamicActivationInt4WeightConfig):
    """Like ours; the layout is checked."""

    act_group_size: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_layout(self, self.layout)


@dataclass(frozen=True, repr=False)
class IntxWeightOnlyConfig(_WithLayout, ours.IntxWeightOnlyConfig):
    """Like ours, with ``layout`` (0.11 and 0.12)."""

    intx_packing_format: Any = IntxPackingFormat.UNPACKED_TO_INT8
    intx_choose_qparams_algorithm: Any = IntxChooseQParamsAlgorithm.AFFINE


@dataclass(frozen=True, repr=False)
class Int8DynamicActivationIntxWeightConfig(_WithLayout, ours.Int8DynamicActivationIntxWeightConfig):
    """Like ours, with ``layout`` (0.11 and 0.12)."""

    intx_packing_format: Any = IntxPackingFormat.UNPACKED_TO_INT8
    intx_choose_qparams_algorithm: Any = IntxChooseQParamsAlgorithm.AFFINE
    act_group_size: int | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Int4DynamicActivationInt4WeightConfig(ours.AOBaseConfig):
    """int4 weights per row with int4 activations per token, both symmetric. Uses the dequantize fallback (counted)."""

    layout: Any = None
    mapping_type: MappingType = MappingType.SYMMETRIC
    act_mapping_type: MappingType = MappingType.SYMMETRIC
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        _check_layout(self, self.layout)
        if {self.mapping_type, self.act_mapping_type} != {MappingType.SYMMETRIC}:
            raise NotImplementedError("Only mapping_type=SYMMETRIC and act_mapping_type=SYMMETRIC are supported")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = activation(INT4, site, PerToken(), eps=INT8_EPS)
        return Scheme(QuantSpec(INT4, site.block(PerRow())), act, "symmetric", INT8_EPS)


@dataclass(frozen=True)
class GemliteUIntXWeightOnlyConfig(ours.AOBaseConfig):
    """4- or 8-bit weights in groups with integer zero points; ``mode`` "dynamic" quantizes activations to int8."""

    group_size: int | None = 128
    bit_width: int = 4
    packing_bitwidth: int | None = None
    mode: str | None = "weight_only"
    set_inductor_config: bool = True
    contiguous: bool | None = None

    def __post_init__(self) -> None:
        if self.bit_width not in (4, 8) or self.mode not in ("weight_only", "dynamic"):
            raise ValueError(f"gemlite needs 4 or 8 bits, weight_only or dynamic, got {self.bit_width}, {self.mode!r}")

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity: Granularity = PerRow() if self.group_size is None else PerGroup(self.group_size)
        block = site.block(granularity, on_indivisible)
        spec = QuantSpec(as_format(f"uint{self.bit_width}"), block, site.dtype, True)
        act = None if self.mode == "weight_only" else activation(INT8, site, PerToken(), eps=INT8_EPS)
        return Scheme(spec, act, "asymmetric", INT8_EPS)


@dataclass(frozen=True)
class PrototypeInt4WeightOnlyConfig(ours.Int4WeightOnlyConfig):
    """torchao's int4 weights for CPUs: same values as Int4WeightOnlyConfig."""

    version: int = 1


@dataclass(frozen=True)
class Float8DynamicActivationFloat8SemiSparseWeightConfig(ours.AOBaseConfig):
    """float8 weights pruned 2:4, with a scale per output channel; float8 activations with a scale per token."""

    layout: Any = field(default_factory=CutlassSemiSparseLayout)
    activation_dtype: Any = torch.float8_e5m2
    weight_dtype: Any = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if not isinstance(self.layout, CutlassSemiSparseLayout):
            raise NotImplementedError(f"Only CutlassSemiSparseLayout layout is supported. Received {self.layout}.")
        require_float8(type(self).__name__, self.weight_dtype, self.activation_dtype)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        act = ActivationSpec(QuantSpec(as_format(self.activation_dtype), site.activation_block(PerRow())))
        return _prune(self, Scheme(QuantSpec(as_format(self.weight_dtype), site.block(PerRow())), act), site)


def int8_dynamic_activation_int8_semi_sparse_weight() -> Any:
    """int8 weights pruned 2:4, with int8 activations per token."""
    return Int8DynamicActivationInt8WeightConfig(layout=SemiSparseLayout())


int4_weight_only = Int4WeightOnlyConfig
int8_dynamic_activation_int8_weight = Int8DynamicActivationInt8WeightConfig
int8_dynamic_activation_int4_weight = Int8DynamicActivationInt4WeightConfig
int8_static_activation_int8_weight = Int8StaticActivationInt8WeightConfig
int4_dynamic_activation_int4_weight = Int4DynamicActivationInt4WeightConfig
intx_weight_only = IntxWeightOnlyConfig
gemlite_uintx_weight_only = GemliteUIntXWeightOnlyConfig

# names of FqnToConfig in 0.11, and in 0.12 to 0.15
AOPerModuleConfig = ModuleFqnToConfig = ours.FqnToConfig
