"""torchao.quantization.qat.fake_quantize_config: how a weight or an input is fake-quantized.

Fields may be assigned, as in torchao. A config also tells which scheme it trains for (``weight_spec``,
``activation_spec``): ``quantize_`` computes prepared layers as that scheme does when deployed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pennyweight.core.formats import E4M3, UINT4, Format, get_format
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning.configs.base import as_format
from pennyweight.planning.granularity import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerTensor, PerToken

from ..enums import FP8Granularity, TorchAODType, ZeroPointDomain
from ..qparams import _SUB_BYTE_INT_BOUNDS, _SUB_BYTE_UINT_BOUNDS
from .functions import AnyOfBase, _log_deprecation_warning

__all__ = [
    "FakeQuantizeConfig", "FakeQuantizeConfigBase", "Float8FakeQuantizeConfig", "Int4WeightFakeQuantizeConfig",
    "IntxFakeQuantizeConfig",
]  # fmt: skip
_DTYPES = (torch.int8, torch.uint8, *_SUB_BYTE_INT_BOUNDS, *_SUB_BYTE_UINT_BOUNDS)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class FakeQuantizeConfigBase:
    """How a weight or an input is fake-quantized.

    rule, eps  those of the scheme of a weight that is trained with this config
    """

    rule: ClassVar[Any] = None
    eps: Any = None

    @property
    def weight_spec(self) -> QuantSpec | None:
        """The spec of a weight that is trained with this config; None if no deployed weight computes like it."""
        return None

    @property
    def activation_spec(self) -> ActivationSpec | None:
        """The spec of an input, likewise."""
        return None


@dataclass(init=False)
class IntxFakeQuantizeConfig(FakeQuantizeConfigBase):
    """Integers of up to 8 bits.

    dtype           torch.int1 to torch.int8, torch.uint1 to torch.uint8, or a TorchAODType
    granularity     PerToken(), PerAxis(0), PerGroup(n), or "per_token", "per_channel", "per_group" with ``group_size``.
                    ``group_size`` alone means groups
    mapping_type    SYMMETRIC by default, also for tokens; ``is_symmetric`` says the same
    zero_point_domain  of asymmetric weights: integer codes, or under FLOAT the value of the middle code (tinygemm)
    is_dynamic      whether scales are computed in each forward pass, or once
    range_learning  whether scales and asymmetric zero points are trained; needs ``is_dynamic=False``
    eps             floor of the scale; default: the smallest normal number of the input's dtype

    ``group_size`` and ``is_symmetric`` may be read and assigned. Raises ValueError for contradictions.
    """

    dtype: Any
    granularity: Granularity
    mapping_type: MappingType
    scale_precision: torch.dtype
    zero_point_precision: torch.dtype
    zero_point_domain: ZeroPointDomain
    is_dynamic: bool = True
    range_learning: bool = False
    eps: float | None = None

    def __init__(
        self, dtype: Any, granularity: Granularity | str | None = None, mapping_type: MappingType | None = None,
        scale_precision: torch.dtype = torch.float32, zero_point_precision: torch.dtype = torch.int32,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, is_dynamic: bool = True,
        range_learning: bool = False, eps: float | None = None, *, group_size: int | None = None,
        is_symmetric: bool | None = None,
    ) -> None:  # fmt: skip
        if zero_point_domain is None:
            raise ValueError("Please use ZeroPointDomain.NONE instead of None")
        if dtype not in _DTYPES:
            raise ValueError(f"Unsupported dtype '{dtype}', choose from {list(_DTYPES)}")
        if is_dynamic and range_learning:
            raise ValueError("`is_dynamic` is not compatible with `range_learning`; pass is_dynamic=False")
        self.dtype = dtype
        self.granularity = _granularity(granularity, group_size)
        self.mapping_type = _mapping(mapping_type, is_symmetric)
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision
        self.zero_point_domain, self.is_dynamic = zero_point_domain, is_dynamic
        self.range_learning, self.eps = range_learning, eps
        self.__post_init__()

    def __post_init__(self) -> None:
        """For subclasses; everything is set."""

    @property
    def group_size(self) -> int:
        if not isinstance(self.granularity, PerGroup):
            raise ValueError(f"`group_size` is undefined for {self.granularity} granularity")
        return self.granularity.group_size

    @group_size.setter
    def group_size(self, value: int) -> None:
        self.granularity = PerGroup(value)

    @property
    def is_symmetric(self) -> bool:
        return self.mapping_type is MappingType.SYMMETRIC

    @is_symmetric.setter
    def is_symmetric(self, value: bool) -> None:
        self.mapping_type = MappingType.SYMMETRIC if value else MappingType.ASYMMETRIC

    # -- the scheme it trains for --------------------------------------------------------------------------------------

    @property
    def _format(self) -> Format:
        return get_format(self.dtype.name.lower()) if isinstance(self.dtype, TorchAODType) else as_format(self.dtype)

    @property
    def _scale_dtype(self) -> torch.dtype:
        return torch.float32 if self.scale_precision is None else self.scale_precision

    @property
    def _group(self) -> int:
        return self.granularity.group_size if isinstance(self.granularity, PerGroup) else -1

    @property
    def weight_spec(self) -> QuantSpec | None:
        fmt, scale = self._format, self._scale_dtype
        if isinstance(self.granularity, PerToken) or self.zero_point_domain is ZeroPointDomain.NONE:
            return None
        if self.is_symmetric:
            whole = fmt.name.startswith("int") and self.zero_point_domain is ZeroPointDomain.INT
            return QuantSpec(fmt, (self._group,), scale) if whole else None
        if self.zero_point_domain is ZeroPointDomain.FLOAT and fmt.name.startswith("uint"):
            return QuantSpec(fmt, (self._group,), scale, offset=scale, mid=1 << (fmt.bits - 1))
        return None  # torchao takes an offset of values for an integer zero point; no deployed weight does

    @property
    def rule(self) -> str:  # type: ignore[override]
        return "symmetric" if self.is_symmetric else "minmax"

    @property
    def activation_spec(self) -> ActivationSpec | None:
        integer = self.zero_point_domain is ZeroPointDomain.INT
        if not (isinstance(self.granularity, PerToken) and self.is_dynamic and integer):
            return None
        spec = QuantSpec(self._format, (-1,), self._scale_dtype, zero_point=not self.is_symmetric)
        return ActivationSpec(spec, "dynamic", None, self.eps)


def _granularity(given: Granularity | str | None, group_size: int | None) -> Granularity:
    if group_size is not None and given not in (None, "per_group"):
        raise ValueError(f"`group_size` conflicts with granularity '{given}'")
    if isinstance(given, Granularity):
        if not isinstance(given, (PerToken, PerAxis, PerGroup)):
            raise ValueError(f"Granularity '{given}' is not supported; use PerToken, PerAxis(0) or PerGroup")
        if isinstance(given, PerAxis) and given.axis != 0:
            raise ValueError(f"Only axis=0 is supported for PerAxis granularity, got {given}")
        return given
    if given == "per_token":
        return PerToken()
    if given == "per_channel":
        return PerAxis(0)
    if given is not None and given != "per_group":
        if isinstance(given, str):
            known = ["per_token", "per_channel", "per_group"]
            raise ValueError(f"Unexpected granularity: '{given}', must be one of {known}")
        raise ValueError(f"Granularity '{given}' has unexpected type {type(given)}")
    if group_size is None:
        if given == "per_group":
            raise ValueError("Granularity was 'per_group' but no `group_size` was set")
        raise ValueError("At least one of `granularity` or `group_size` must be set")
    return PerGroup(group_size)


def _mapping(given: MappingType | None, is_symmetric: bool | None) -> MappingType:
    if given is not None and is_symmetric is not None:
        raise ValueError("Cannot set both `mapping_type` and `is_symmetric`")
    if given is not None and given not in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
        raise ValueError(f"MappingType '{given}' is not supported; use SYMMETRIC or ASYMMETRIC")
    if is_symmetric is not None:
        return MappingType.SYMMETRIC if is_symmetric else MappingType.ASYMMETRIC
    return MappingType.SYMMETRIC if given is None else given


class FakeQuantizeConfig(IntxFakeQuantizeConfig, metaclass=AnyOfBase):
    """The name of :class:`IntxFakeQuantizeConfig` before 0.13; warns when called. Instances of either are of both."""

    def __post_init__(self) -> None:
        _log_deprecation_warning(self)


@dataclass
class Float8FakeQuantizeConfig(FakeQuantizeConfigBase):
    """float8 with a scale per row or per tensor; the largest magnitude that the scale covers is clamped to
    hp_value_lb..hp_value_ub."""

    dtype: torch.dtype = torch.float8_e4m3fn
    granularity: FP8Granularity = PerRow()  # noqa: RUF009 - frozen
    hp_value_lb: float | None = None
    hp_value_ub: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _FLOAT8:
            raise ValueError(f"{self.dtype} is not a float8 dtype")
        if isinstance(self.granularity, type):
            raise ValueError("Please specify the granularity object instead of the class, e.g. PerRow() not PerRow")
        if type(self.granularity) not in (PerRow, PerTensor):
            raise ValueError(f"Expected PerRow or PerTensor granularity, got {self.granularity}")

    @property
    def weight_spec(self) -> QuantSpec | None:
        if self.hp_value_lb is not None or self.hp_value_ub is not None or self.dtype not in _FLOAT8[:2]:
            return None
        return QuantSpec(as_format(self.dtype), None if isinstance(self.granularity, PerTensor) else (-1,))

    @property
    def activation_spec(self) -> ActivationSpec | None:
        return None if self.weight_spec is None else ActivationSpec(self.weight_spec)


@dataclass
class Int4WeightFakeQuantizeConfig(FakeQuantizeConfigBase):
    """int4 weights in groups: with an offset for bfloat16 inputs, symmetric and through float8 for float8 inputs."""

    group_size: int = 128
    activation_dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.activation_dtype not in (torch.float8_e4m3fn, torch.bfloat16):
            raise ValueError(
                f"Only {torch.float8_e4m3fn} or torch.bfloat16 activation are supported, got {self.activation_dtype}"
            )

    @property
    def weight_spec(self) -> QuantSpec | None:
        if self.activation_dtype is torch.bfloat16:
            return QuantSpec(UINT4, (self.group_size,), torch.bfloat16, offset=torch.bfloat16, mid=8)
        return QuantSpec(get_format("int4"), (self.group_size,), torch.bfloat16)

    @property
    def activation_spec(self) -> ActivationSpec | None:
        return ActivationSpec(QuantSpec(E4M3, (-1,))) if self.activation_dtype is torch.float8_e4m3fn else None
