"""torchao.quantization.qat.api: configs of ``quantize_`` before and after training.

Linear layers and embeddings are replaced by layers with torchao's fake quantizers (:class:`FakeQuantizedLinear`,
:class:`FakeQuantizedEmbedding`). Any other base config, and any other module, is prepared by
:class:`pennyweight.QATConfig`, which torchao refuses: then modules are kept.
"""

# ruff: noqa: UP042 - StrEnum prints the value where torchao's print the member

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.planning.configs.by_name import named
from pennyweight.quantize.pipeline import Pipeline

from .fake_quantize_configs import FakeQuantizeConfigBase
from .fake_quantizers import IntxFakeQuantizer
from .functions import _log_deprecation_warning
from .steps import QATPipeline, register

__all__ = [
    "FromIntXQuantizationAwareTrainingConfig", "IntXQuantizationAwareTrainingConfig", "QATConfig", "QATStep",
    "from_intx_quantization_aware_training", "initialize_fake_quantizers", "intx_quantization_aware_training",
]  # fmt: skip


class QATStep(str, Enum):
    PREPARE = "prepare"
    CONVERT = "convert"


@dataclass(init=False)
class QATConfig(AOBaseConfig):
    """Quantization-aware training: ``quantize_(model, QATConfig(base, step="prepare"))``, train, and the same with
    ``step="convert"``. Fields may be assigned.

    base_config        the config of the quantized model
    activation_config, weight_config  fake quantization configs instead of ``base_config``; embeddings take only the
                       latter. A :class:`~pennyweight.QuantSpec` and ActivationSpec are accepted, too
    step               "prepare" or "convert", in any case, or a QATStep. "convert" without ``base_config`` gives the
                       float layers back; a base config that differs from the trained one is applied, with a warning

    Raises ValueError for contradictions.
    """

    base_config: AOBaseConfig | None = None
    activation_config: Any = None
    weight_config: Any = None
    step: Any = "prepare"

    def __init__(
        self, base_config: Any = None, activation_config: Any = None, weight_config: Any = None, *,
        step: Any = "prepare",
    ) -> None:  # fmt: skip
        if isinstance(base_config, FakeQuantizeConfigBase):
            raise ValueError(
                f"{type(base_config).__name__} was passed as `base_config`; it belongs in "
                "QATConfig(activation_config=.., weight_config=.., step='prepare')"
            )
        self.base_config = named(base_config)
        self.activation_config, self.weight_config, self.step = activation_config, weight_config, step
        self.__post_init__()

    def __post_init__(self) -> None:
        self.step = self.settled_step
        given = (self.activation_config, self.weight_config)
        if self.base_config is not None and not isinstance(self.base_config, AOBaseConfig):
            raise ValueError(f"`base_config` must be a config such as Int4WeightOnlyConfig(), got {self.base_config!r}")
        if isinstance(self.base_config, QATConfig):
            raise ValueError("`base_config` must not be a QATConfig")
        for one in given:
            if not (one is None or isinstance(one, (FakeQuantizeConfigBase, QuantSpec, ActivationSpec))):
                raise ValueError(f"{one!r} is not one of FakeQuantizeConfigBase")
        for name, one in zip(("activation_config", "weight_config"), given, strict=True):
            if self.base_config is not None and one is not None:
                raise ValueError(f"Cannot specify both `base_config` and `{name}`")
        nothing = self.base_config is None and given == (None, None)
        if self.step == "prepare" and nothing:
            raise ValueError(
                "Must specify `base_config`, `activation_config`, or `weight_config` in the prepare step, for example "
                "QATConfig(Int4WeightOnlyConfig(group_size=32))"
            )
        if self.step == "convert" and given != (None, None):
            raise ValueError("Cannot specify `weight_config` or `activation_config` in the convert step")

    @property
    def settled_step(self) -> str:
        """ "prepare" or "convert". Raises ValueError for another step."""
        step = getattr(self.step, "value", self.step)
        known = [s.value for s in QATStep]
        if not isinstance(step, str) or step.lower() not in known:
            raise ValueError(f"`step` must be one of {known}, got {self.step!r}")
        return step.lower()

    @property
    def pipeline(self) -> type[Pipeline]:  # type: ignore[override]
        return QATPipeline


class IntXQuantizationAwareTrainingConfig(QATConfig):
    """The prepare step before 0.13; warns. Without configs, layers are swapped and nothing is quantized."""

    def __init__(self, activation_config: Any = None, weight_config: Any = None) -> None:
        super().__init__(None, activation_config, weight_config, step="prepare")

    def __post_init__(self) -> None:
        if self.activation_config is not None or self.weight_config is not None:
            super().__post_init__()
        _log_deprecation_warning(self)


class FromIntXQuantizationAwareTrainingConfig(QATConfig):
    """Converting back to float before 0.13; warns."""

    def __init__(self) -> None:
        super().__init__(step="convert")

    def __post_init__(self) -> None:
        super().__post_init__()
        _log_deprecation_warning(self)


class intx_quantization_aware_training(IntXQuantizationAwareTrainingConfig):
    """The oldest name of the prepare step."""


class from_intx_quantization_aware_training(FromIntXQuantizationAwareTrainingConfig):
    """The oldest name of converting back to float."""


for _kind in (
    QATConfig, IntXQuantizationAwareTrainingConfig, FromIntXQuantizationAwareTrainingConfig,
    intx_quantization_aware_training, from_intx_quantization_aware_training,
):  # fmt: skip
    register(_kind)


def initialize_fake_quantizers(model: nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """Compute the scales and zero points whose range is learned, from a run of the model on the example inputs, and
    make them parameters. Call it before making an optimizer."""
    for module in model.modules():
        if isinstance(module, IntxFakeQuantizer):
            module._initialized = True
    with torch.no_grad():
        model(*example_inputs)
