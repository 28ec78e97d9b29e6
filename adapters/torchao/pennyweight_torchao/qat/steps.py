"""The two steps of a QATConfig in ``quantize_``: prepare and convert one layer at a time, by handler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.torchao.tensor_class import int_codes, ready
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.configs import (
    AOBaseConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
)
from pennyweight.planning.granularity import MappingType, PerRow
from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.planning.parameters import is_linear
from pennyweight.planning.quantize_report import Report
from pennyweight.planning.run_batch import user_level
from pennyweight.quantize.pipeline import Pipeline, quantize_
from pennyweight.training import QATConfig as Ours
from pennyweight.training.qat.module_patches import leave_fused_paths_, take_fused_paths_
from pennyweight.training.qat.modules import FakeQuantized
from pennyweight.training.qat.prepare import Convert, Prepare, TargetError, _same_target, remove_fake_quant

from ..primitives import VALUE_DTYPES, quantize_affine
from ..qparams import _DTYPE_TO_QVALUE_BOUNDS
from .deployment import spec_config
from .embedding import FakeQuantizedEmbedding
from .fake_quantize_configs import (
    FakeQuantizeConfigBase,
    Float8FakeQuantizeConfig,
    Int4WeightFakeQuantizeConfig,
    IntxFakeQuantizeConfig,
)
from .linear import FakeQuantizedLinear

__all__ = ["LINEAR", "_infer_fake_quantize_configs"]
Pair = tuple[FakeQuantizeConfigBase | None, FakeQuantizeConfigBase | None]

# Class of a weight's fake quantization config -> class of the prepared linear layer, with ``from_linear`` and
# ``to_linear``; by default FakeQuantizedLinear.
LINEAR: dict[type, Any] = {}


# -- the fake quantizers of a base config ------------------------------------------------------------------------------


def _int4(base: Any) -> Pair | None:
    return None, Int4WeightFakeQuantizeConfig(base.group_size, torch.bfloat16)


def _float8(base: Any) -> Pair | None:
    act, weight = base.granularity if isinstance(base.granularity, (tuple, list)) else (base.granularity,) * 2
    bounds = (getattr(base, "activation_value_lb", None), getattr(base, "activation_value_ub", None))
    try:
        return (
            Float8FakeQuantizeConfig(base.activation_dtype, act, *bounds),
            Float8FakeQuantizeConfig(base.weight_dtype, weight),
        )
    except ValueError:  # blocks
        return None


def _float8_int4(base: Any) -> Pair | None:
    return Float8FakeQuantizeConfig(torch.float8_e4m3fn, PerRow()), Int4WeightFakeQuantizeConfig(base.group_size)


def _int8_int4(base: Any) -> Pair | None:
    if base.mapping_type is not MappingType.SYMMETRIC or base.act_mapping_type is not MappingType.ASYMMETRIC:
        return None
    act = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    return act, IntxFakeQuantizeConfig(torch.int4, group_size=base.group_size)


def _int8_intx(base: Any) -> Pair | None:
    weight = _intx_weight(
        base.weight_dtype, base.weight_granularity, base.weight_mapping_type, base.weight_scale_dtype
    )  # fmt: skip
    if weight is None or base.act_mapping_type is not MappingType.ASYMMETRIC:
        return None
    return IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False, scale_precision=None), weight


def _intx(base: Any) -> Pair | None:
    weight = _intx_weight(base.weight_dtype, base.granularity, base.mapping_type, base.scale_dtype)
    return None if weight is None else (None, weight)


def _intx_weight(dtype: Any, granularity: Any, mapping: MappingType, scale: Any) -> IntxFakeQuantizeConfig | None:
    if mapping is not MappingType.SYMMETRIC or scale is not None or dtype == torch.int1:
        return None
    return IntxFakeQuantizeConfig(dtype, granularity, mapping, scale_precision=None)


INFERRED: dict[type, Callable[[Any], Pair | None]] = {
    Int4WeightOnlyConfig: _int4,
    Float8DynamicActivationFloat8WeightConfig: _float8,
    Float8DynamicActivationInt4WeightConfig: _float8_int4,
    Int8DynamicActivationInt4WeightConfig: _int8_int4,
    Int8DynamicActivationIntxWeightConfig: _int8_intx,
    IntxWeightOnlyConfig: _intx,
}


def _inferred(base: AOBaseConfig) -> Pair | None:
    return next((infer(base) for kind, infer in INFERRED.items() if isinstance(base, kind)), None)


def _infer_fake_quantize_configs(base_config: AOBaseConfig) -> Pair:
    """(activation config, weight config) of the fake quantizers that train for a base config.

    Raises ValueError for a base config without, which ``quantize_`` prepares by :class:`pennyweight.QATConfig`.
    """
    found = _inferred(base_config)
    if found is None:
        raise ValueError(f"Unexpected base config: {base_config}; quantize_(model, QATConfig(base_config)) prepares it")
    return found


# -- handlers ----------------------------------------------------------------------------------------------------------


def _prepare(module: nn.Module, config: Any) -> nn.Module:
    base = config.base_config
    act, weight = config.activation_config, config.weight_config
    if base is not None:
        act, weight = _infer_fake_quantize_configs(base)
    if isinstance(module, nn.Linear):
        plain = module.to_linear() if isinstance(module, FakeQuantizedLinear) else module
        layer = LINEAR.get(type(weight), FakeQuantizedLinear)
        new = layer.from_linear(plain, act, weight)
    elif isinstance(module, nn.Embedding):
        if act is not None:
            raise ValueError("Activation fake quantization is not supported for embedding")
        plain = module.to_embedding() if isinstance(module, FakeQuantizedEmbedding) else module
        new = FakeQuantizedEmbedding.from_embedding(plain, weight)
    else:
        raise ValueError(
            f"Module of type '{type(module)}' does not have QAT support; only Linear and Embedding have it"
        )
    if isinstance(new, (FakeQuantizedLinear, FakeQuantizedEmbedding)):
        new.deploy(base)
    return new


def is_prepared(module: nn.Module) -> bool:
    """Whether a module is a prepared layer that converts to a plain one."""
    return isinstance(module, (FakeQuantizedLinear, FakeQuantizedEmbedding, *LINEAR.values()))


def _convert(module: Any, config: Any) -> nn.Module:
    if not is_prepared(module):
        return module
    base, quantizer = config.base_config, getattr(module, "weight_fake_quantizer", None)
    new = module.to_embedding() if isinstance(module, nn.Embedding) else module.to_linear()
    if base is None:
        return new
    trained = getattr(quantizer, "config", None)
    learned = isinstance(trained, IntxFakeQuantizeConfig) and trained.range_learning
    found = getattr(module, "deployment", None)
    if found is not None and not learned:
        try:
            _same_target(found.fake.site.name, found.fake, base, "pad")
        except TargetError as error:
            warnings.warn(f"{error}. It is requantized.", stacklevel=user_level())
    quantize_(new, base, lambda m, fqn: m is new)
    if learned:
        new.weight = nn.Parameter(_with_learned_range(module, new.weight), requires_grad=False)
    return new


def _with_learned_range(module: Any, w: AffineQuantizedTensor) -> Tensor:
    """The weight of a trained layer under its learned scale and zero point, with the inputs of the quantized ``w``.

    Raises ValueError if ``w`` has other codes or other groups than were trained.
    """
    quantizer, latent = module.weight_fake_quantizer, module.weight.detach()
    config = quantizer.config
    block = (1, config.group_size if hasattr(config.granularity, "group_size") else latent.shape[-1])
    low, high = _DTYPE_TO_QVALUE_BOUNDS[config.dtype]
    found = (w.spec.format.lo, w.spec.format.hi, 0 if w.scale is None else w.scale.numel())
    if w.spec.format.kind != "int" or found != (low, high, quantizer.scale.numel()):
        raise ValueError(
            f"the learned scales are of codes {low} to {high} in blocks of {block}, and base_config gives {w.spec}; "
            "convert with the config that they were trained for, or without base_config"
        )
    scale = quantizer.scale.detach().to(w.scale.dtype)
    zero = quantizer.zero_point.detach().round().clamp(low, high).to(torch.int32)
    codes = quantize_affine(latent, block, scale, zero, config.dtype, low, high)
    return ready(int_codes(codes, scale, zero, block, latent.dtype, low, high, act=w.act))


def qat_step(module: nn.Module, config: Any) -> nn.Module:
    return _prepare(module, config) if config.settled_step == "prepare" else _convert(module, config)


def _tells(module: nn.Module, config: Any) -> tuple[bool, str]:
    if config.settled_step == "convert":
        return is_prepared(module), "converted" if is_prepared(module) else "is not prepared"
    return True, "prepared for quantization-aware training"


def register(kind: type) -> None:
    """Make ``quantize_``, and FqnToConfig within, prepare and convert layers under configs of a class."""
    register_quantize_module_handler(kind, _tells)(qat_step)


# -- quantize_ ---------------------------------------------------------------------------------------------------------


class QATPipeline(Pipeline):
    """Runs the step with torchao's layers where it has some, and with pennyweight's own preparation elsewhere."""

    def run(self) -> Report:
        config: Any = self.config
        return self._prepare(config) if config.settled_step == "prepare" else self._convert(config)

    def _prepare(self, config: Any) -> Report:
        base, options = config.base_config, self.options
        specs = [isinstance(c, QuantSpec) for c in (config.activation_config, config.weight_config)]
        if any(specs):
            ours: Any = Ours(None, config.activation_config, config.weight_config)
        elif options.has_recipe:  # a solver chooses codes to start from, which torchao's layers do not hold
            target = spec_config(config.activation_config, config.weight_config) if base is None else base
            if target is None:
                raise PlanError("calibration and algorithm need a base_config, such as Int4WeightOnlyConfig()")
            ours = Ours(target)
        elif base is not None and not self._has_layers(base):
            ours = Ours(base)
        else:
            report = super().run()
            if not options.dry_run:
                leave_fused_paths_(self.model)
            return report
        return Prepare(self.model, ours, options).run()

    def _has_layers(self, base: AOBaseConfig) -> bool:
        """Whether torchao's layers train for this config, and every selected module has one."""
        found, pick = _inferred(base), self.options.filter_fn
        if found is None:
            return False
        group = getattr(found[1], "granularity", found[1])
        size = getattr(group, "group_size", 1)
        chosen: list[Any] = [m for name, m in self.model.named_modules() if (pick or is_linear)(m, name)]
        return all(
            isinstance(m, (nn.Linear, nn.Embedding))
            and m.weight.shape[-1] % size == 0
            and m.weight.dtype in VALUE_DTYPES
            for m in chosen
        )

    def _convert(self, config: Any) -> Report:
        pick = self.options.filter_fn or is_linear
        chosen = [m for name, m in self.model.named_modules() if pick(m, name)]
        report = None
        if any(is_prepared(m) for m in chosen):
            report = super().run()
            if not self.options.dry_run:
                take_fused_paths_(self.model)
        if report is not None and not any(isinstance(m, FakeQuantized) for m in chosen):
            return report
        return _ConvertOurs(self.model, Ours(config.base_config, step="convert"), self.options).run()


class _ConvertOurs(Convert):
    """Converts what :class:`pennyweight.QATConfig` prepared; without ``base_config`` to float."""

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
