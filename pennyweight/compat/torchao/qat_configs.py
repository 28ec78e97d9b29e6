"""torchao.quantization.qat: its configs, over :class:`pennyweight.QATConfig`.

Models are prepared and converted as in pennyweight: modules are kept, and training uses the deployed numerics. The
numerics are those of the config used for conversion, where torchao's fake quantizers partly differ.
"""

# ruff: noqa: UP042 - StrEnum prints the value where torchao's print the member

from __future__ import annotations

import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from ...core.formats import E4M3, UINT4, get_format
from ...core.spec import ActivationSpec, QuantSpec
from ...planning.configs import AOBaseConfig
from ...planning.configs.base import as_format
from ...planning.configs.integer import INT8_EPS
from ...planning.granularity import Granularity, MappingType, PerAxis, PerGroup, PerRow, PerTensor, PerToken
from ...planning.report import Report
from ...planning.run_batch import user_level
from ...quantize.pipeline import Pipeline
from ...training import QATConfig as Ours
from ...training.qat.prepare import Convert, Prepare, TargetError, remove_fake_quant
from .enums import TorchAODType, ZeroPointDomain

__all__ = [
    "FakeQuantizeConfig", "FakeQuantizeConfigBase", "Float8FakeQuantizeConfig",
    "FromIntXQuantizationAwareTrainingConfig", "Int4WeightFakeQuantizeConfig", "IntXQuantizationAwareTrainingConfig",
    "IntxFakeQuantizeConfig", "QATConfig", "QATStep", "from_intx_quantization_aware_training",
    "initialize_fake_quantizers", "intx_quantization_aware_training",
]  # fmt: skip


class QATStep(str, Enum):
    PREPARE = "prepare"
    CONVERT = "convert"


class FakeQuantizeConfigBase:
    """How a weight is fake-quantized (``weight_spec``), or an input (``activation_spec``)."""

    rule: str | None = None
    eps: float | None = None
    range_learning: bool = False

    @property
    def of_inputs(self) -> bool:
        """Whether it supports only activations."""
        return False

    @property
    def weight_spec(self) -> QuantSpec:
        raise ValueError(f"{type(self).__name__} does not support weights")

    @property
    def activation_spec(self) -> ActivationSpec:
        raise ValueError(f"{type(self).__name__} does not support activations")


_NAMES = {"per_token": PerToken, "per_channel": lambda: PerAxis(0)}


class IntxFakeQuantizeConfig(FakeQuantizeConfigBase):
    """Integers, of a granularity: ``PerToken()``, ``PerAxis(0)``, ``PerGroup(n)``, or as "per_group" with group_size.

    Asymmetric weights have integer zero points, or under ZeroPointDomain.FLOAT a real offset (tinygemm's).
    """

    def __init__(
        self, dtype: Any, granularity: Granularity | str | None = None, mapping_type: MappingType | None = None,
        scale_precision: torch.dtype = torch.float32, zero_point_precision: torch.dtype = torch.int32,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, is_dynamic: bool = True,
        range_learning: bool = False, eps: float | None = None, *, group_size: int | None = None,
        is_symmetric: bool | None = None,
    ) -> None:  # fmt: skip
        if zero_point_domain is None:
            raise ValueError("Please use ZeroPointDomain.NONE instead of None")
        if is_dynamic and range_learning:
            raise ValueError("`is_dynamic` is not compatible with `range_learning`")
        if mapping_type is not None and is_symmetric is not None:
            raise ValueError("Cannot set both `mapping_type` and `is_symmetric`")
        self.dtype = get_format(dtype.name.lower()) if isinstance(dtype, TorchAODType) else as_format(dtype)
        if self.dtype.kind != "int":
            raise ValueError(f"Unsupported dtype '{dtype}', choose from int1 to int8 and uint1 to uint8")
        self.granularity = _granularity(granularity, group_size)
        if is_symmetric is not None:
            mapping_type = MappingType.SYMMETRIC if is_symmetric else MappingType.ASYMMETRIC
        if mapping_type is None:
            token = isinstance(self.granularity, PerToken)
            mapping_type = MappingType.ASYMMETRIC if token else MappingType.SYMMETRIC
        if isinstance(self.granularity, PerToken) and mapping_type is not MappingType.ASYMMETRIC:
            raise ValueError("Symmetric per-token quantization is not supported")
        self.mapping_type = mapping_type
        self.scale_precision, self.zero_point_precision = scale_precision, zero_point_precision
        self.zero_point_domain, self.is_dynamic = zero_point_domain, is_dynamic
        self.range_learning = range_learning
        self.eps = INT8_EPS if eps is None else eps

    @property
    def group_size(self) -> int:
        if not isinstance(self.granularity, PerGroup):
            raise ValueError(f"`group_size` is undefined for {self.granularity} granularity")
        return self.granularity.group_size

    @property
    def is_symmetric(self) -> bool:
        return self.mapping_type is MappingType.SYMMETRIC

    @property
    def rule(self) -> str:  # type: ignore[override]
        if self._offset:
            return "minmax"
        return self.mapping_type.rule

    @property
    def _offset(self) -> bool:
        return self.mapping_type is MappingType.ASYMMETRIC and self.zero_point_domain is ZeroPointDomain.FLOAT

    @property
    def of_inputs(self) -> bool:
        return isinstance(self.granularity, PerToken)

    @property
    def weight_spec(self) -> QuantSpec:
        if self.of_inputs:
            raise ValueError("Only per group and per channel granularity are supported for weights, not PerToken()")
        group = self.granularity.group_size if isinstance(self.granularity, PerGroup) else -1
        if self._offset:
            fmt = get_format(f"uint{self.dtype.bits}")
            middle = 1 << (fmt.bits - 1)
            return QuantSpec(fmt, (group,), self.scale_precision, offset=self.scale_precision, mid=middle)
        asymmetric = self.mapping_type is MappingType.ASYMMETRIC
        return QuantSpec(self.dtype, (group,), self.scale_precision, zero_point=self.dtype if asymmetric else False)

    @property
    def activation_spec(self) -> ActivationSpec:
        if not self.is_dynamic:
            raise ValueError(
                "a static activation needs a scale first: calibrate it, use "
                "Int8StaticActivationInt8WeightConfig(scale), and learn it: pennyweight.QATConfig(.., learn='scale')"
            )
        group = self.granularity.group_size if isinstance(self.granularity, PerGroup) else -1
        asymmetric = self.mapping_type is MappingType.ASYMMETRIC
        spec = QuantSpec(self.dtype, (group,), self.scale_precision, zero_point=asymmetric)
        return ActivationSpec(spec, "dynamic", None, self.eps)

    def __repr__(self) -> str:
        return f"IntxFakeQuantizeConfig({self.dtype}, {self.granularity}, {self.mapping_type})"


def _granularity(given: Granularity | str | None, group_size: int | None) -> Granularity:
    if given is None and group_size is None:
        raise ValueError("`granularity` or `group_size` must be set")
    if group_size is not None:
        if given not in (None, "per_group"):
            raise ValueError(f"`group_size` conflicts with granularity '{given}'")
        return PerGroup(group_size)
    if given == "per_group":
        raise ValueError("Granularity was 'per_group' but no `group_size` was set")
    if isinstance(given, str):
        if given not in _NAMES:
            raise ValueError(f"Unexpected granularity '{given}', choose from per_token, per_channel, per_group")
        return _NAMES[given]()
    if isinstance(given, PerAxis) and given.axis != 0:
        raise ValueError("Only axis=0 is supported for PerAxis granularity")
    if not isinstance(given, (PerToken, PerAxis, PerGroup)):
        raise ValueError(f"Granularity must be PerToken, PerAxis or PerGroup, got {given!r}")
    return given


class FakeQuantizeConfig(IntxFakeQuantizeConfig):
    """The older name."""


@dataclass
class Float8FakeQuantizeConfig(FakeQuantizeConfigBase):
    """float8 with a scale per row or per tensor. Bounds on the range are not supported."""

    dtype: Any = torch.float8_e4m3fn
    granularity: Any = PerRow()  # noqa: RUF009 - frozen
    hp_value_lb: float | None = None
    hp_value_ub: float | None = None

    def __post_init__(self) -> None:
        if as_format(self.dtype).kind != "float":
            raise ValueError(f"{self.dtype} is not a float8 dtype")
        if not isinstance(self.granularity, (PerRow, PerTensor)):
            raise ValueError(f"Expected PerRow or PerTensor granularity, got {self.granularity}")
        if self.hp_value_lb is not None or self.hp_value_ub is not None:
            raise ValueError("hp_value_lb and hp_value_ub are not supported; omit them")

    @property
    def _spec(self) -> QuantSpec:
        return QuantSpec(as_format(self.dtype), None if isinstance(self.granularity, PerTensor) else (-1,))

    @property
    def weight_spec(self) -> QuantSpec:
        return self._spec

    @property
    def activation_spec(self) -> ActivationSpec:
        return ActivationSpec(self._spec)


@dataclass
class Int4WeightFakeQuantizeConfig(FakeQuantizeConfigBase):
    """int4 in groups: with an offset for bfloat16 inputs, symmetric for float8 inputs."""

    group_size: int = 128
    activation_dtype: Any = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.activation_dtype not in (torch.float8_e4m3fn, torch.bfloat16):
            raise ValueError(f"Only float8_e4m3fn or bfloat16 activations are supported, got {self.activation_dtype}")

    @property
    def weight_spec(self) -> QuantSpec:
        if self.activation_dtype is torch.bfloat16:
            return QuantSpec(UINT4, (self.group_size,), torch.bfloat16, offset=torch.bfloat16, mid=8)
        return QuantSpec(get_format("int4"), (self.group_size,), torch.bfloat16)

    @property
    def activation_spec(self) -> ActivationSpec:
        return ActivationSpec(QuantSpec(E4M3, (-1,)))


class _Convert(Convert):
    """torchao's conversion: see :class:`QATConfig`."""

    def run(self) -> Report:
        config: Any = self.config
        if config.base_config is None:
            remove_fake_quant(self.model)
            return Report(str(config), verb="undone")
        try:
            return super().run()
        except TargetError as error:
            warnings.warn(f"{error}. It is requantized.", stacklevel=user_level())
        remove_fake_quant(self.model)
        return Pipeline(self.model, config.base_config, self.options).run()


class QATConfig(Ours):
    """Like ours, with torchao's conversion: without ``base_config`` modules become float again; a base config that
    differs from the trained one is applied to them, with a warning."""

    def __init__(
        self, base_config: AOBaseConfig | None = None, activation_config: Any = None, weight_config: Any = None, *,
        step: Any = "prepare", learn: str = "none", start: int = 0,
    ) -> None:  # fmt: skip
        for given in (activation_config, weight_config):
            if not (given is None or isinstance(given, (FakeQuantizeConfigBase, QuantSpec, ActivationSpec))):
                raise ValueError(f"{given!r} is not one of FakeQuantizeConfigBase")
        if getattr(weight_config, "range_learning", False):
            learn = "all"
        super().__init__(base_config, activation_config, weight_config, step=step, learn=learn, start=start)

    @property
    def pipeline(self) -> type[Pipeline]:  # type: ignore[override]
        return Prepare if self.step == "prepare" else _Convert


class IntXQuantizationAwareTrainingConfig(QATConfig):
    """The older name of the prepare step."""

    def __init__(self, activation_config: Any = None, weight_config: Any = None) -> None:
        super().__init__(None, activation_config, weight_config, step="prepare")


class FromIntXQuantizationAwareTrainingConfig(QATConfig):
    """The older name of converting back to float, before quantizing."""

    def __init__(self) -> None:
        super().__init__(step="convert")


class intx_quantization_aware_training(IntXQuantizationAwareTrainingConfig):
    """The oldest name of the prepare step."""


class from_intx_quantization_aware_training(FromIntXQuantizationAwareTrainingConfig):
    """The oldest name of converting back to float."""


def initialize_fake_quantizers(model: nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """Learned scales are already initialized from the weights when a model is prepared. The model is run once, as in
    torchao, so that unsuitable inputs raise an error."""
    with torch.no_grad():
        model(*example_inputs)
