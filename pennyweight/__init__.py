# ruff: noqa: F405
"""Pennyweight: quantization of PyTorch models.

What happens is recorded by :mod:`logging`, under loggers of the modules' names: INFO for what a function did (quantized
layers, kernel library, fallbacks to dequantized weights, resumed runs, loaded and saved files), DEBUG for each layer.
Nothing is shown unless the program asks for it::

    logging.basicConfig()
    logging.getLogger("pennyweight").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from .core import distributed_hooks
from .core.errors import ArgumentError
from .core.fallback import FallbackError, FallbackWarning, fallbacks, reset_fallbacks, strict
from .core.formats import Format, get_format
from .core.import_hooks import after_import
from .core.module_repr import show_weights
from .core.spec import ActivationSpec, QuantSpec
from .core.tensor import AffineQuantizedTensor

if TYPE_CHECKING:
    from .algorithms import calibrate, improve, sample, search, sparsify_
    from .inference import FrozenLinear, Recommendation, explain, freeze_, fuse_, recommend, thaw_, together
    from .integrations.transformers import PennyweightConfig as PennyweightConfig
    from .io import CheckpointError, Opened, convert, flatten, open, push_to_hub, quantize_checkpoint, save, unflatten
    from .planning.configs import *  # noqa: F403
    from .planning.granularity import Granularity, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken
    from .quantize import (
        PerformanceWarning,
        Plan,
        PlanError,
        Report,
        Scheme,
        dequantize_,
        plan,
        quantize_,
        register_quantize_module_handler,
    )
    from .report import Comparison, Golden, Verification, assert_kl, compare, golden, load, verify
    from .training import QATConfig, distillation_loss, enable_fake_quant

__version__ = "0.1.0"

__all__ = [
    "AOBaseConfig",
    "AOPerModuleConfig",
    "ActivationSpec",
    "AffineQuantizedTensor",
    "ArgumentError",
    "CheckpointError",
    "CodebookWeightOnlyConfig",
    "Comparison",
    "ContractedAxis",
    "FPXWeightOnlyConfig",
    "FallbackError",
    "FallbackWarning",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "Format",
    "FqnToConfig",
    "FrozenLinear",
    "Golden",
    "Granularity",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt4WeightConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8StaticActivationInt8WeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "MappingType",
    "ModuleFqnToConfig",
    "NF4WeightOnlyConfig",
    "NVFP4WeightOnlyConfig",
    "Opened",
    "PerAxis",
    "PerBlock",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PerformanceWarning",
    "Plan",
    "PlanError",
    "QATConfig",
    "QuantSpec",
    "Recommendation",
    "Report",
    "Scheme",
    "SpecConfig",
    "UIntXWeightOnlyConfig",
    "Verification",
    "__version__",
    "assert_kl",
    "calibrate",
    "compare",
    "convert",
    "dequantize_",
    "distillation_loss",
    "enable_fake_quant",
    "explain",
    "fallbacks",
    "flatten",
    "float8_dynamic_activation_float8_weight",
    "float8_static_activation_float8_weight",
    "float8_weight_only",
    "fpx_weight_only",
    "freeze_",
    "fuse_",
    "get_format",
    "golden",
    "improve",
    "int4_weight_only",
    "int8_dynamic_activation_int4_weight",
    "int8_dynamic_activation_int8_weight",
    "int8_static_activation_int8_weight",
    "int8_weight_only",
    "intx_weight_only",
    "load",
    "open",
    "plan",
    "push_to_hub",
    "quantize_",
    "quantize_checkpoint",
    "recommend",
    "register_quantize_module_handler",
    "reset_fallbacks",
    "sample",
    "save",
    "search",
    "sparsify_",
    "strict",
    "thaw_",
    "together",
    "uintx_weight_only",
    "unflatten",
    "verify",
]

# Records go where the program sends them: without a handler of its own, nowhere
logging.getLogger(__name__).addHandler(logging.NullHandler())

# Tensors and kernels are imported at once, so that a pickled weight loads and runs. The rest is imported at first use,
# because it would more than double the import time.
import_module(".kernels", __name__)
_MODULES: tuple[str, ...] = (
    "planning.configs", "planning.granularity", "quantize", "inference", "algorithms", "training", "report", "io",
)  # fmt: skip
# Not in __all__: `from pennyweight import *` must not need their library
_ADAPTERS = {"PennyweightConfig": "integrations.transformers"}


def _register_with_transformers() -> None:
    import_module(".integrations.transformers_entry", __name__).register()


# print(model) shows what is quantized; Conv1D has a __repr__ of its own
show_weights(nn.Module)
after_import("transformers.pytorch_utils", lambda: show_weights(import_module("transformers.pytorch_utils").Conv1D))
# from_pretrained reads quantized folders whether this package is imported before or after transformers
after_import("transformers.quantizers.auto", _register_with_transformers)
after_import("diffusers.quantizers.auto", lambda: import_module(".integrations.diffusers", __name__))
distributed_hooks.load_with(lambda: import_module(".distributed.dispatch", __name__))


def _register_torchao_reader() -> None:
    from .io.detect_format import EXTERNAL_READERS, ExternalReader

    def reading() -> Any:  # torchao's files need torchao's class names; imported when a file needs them
        return import_module(".compat.torchao.reading", __name__)

    EXTERNAL_READERS.append(
        ExternalReader(
            "torchao",
            "tensor_names",
            lambda checkpoint, config: reading().open_safetensors(checkpoint, config),
            lambda path, mmap: reading().open_pickle(path, mmap),
        )
    )


def _register_model_libraries() -> None:
    from .quantize.save_pretrained import LIBRARIES, Library

    def adapter(name: str) -> Any:
        return lambda: import_module(f".integrations.{name}", __name__)

    LIBRARIES.append(Library("transformers.modeling_utils", "PreTrainedModel", adapter("transformers")))
    LIBRARIES.append(Library("diffusers.models.modeling_utils", "ModelMixin", adapter("diffusers")))


# Tables of lower layers with entries from higher ones, filled as soon as their module is imported
after_import(f"{__name__}.io.detect_format", _register_torchao_reader)
after_import(f"{__name__}.quantize.save_pretrained", _register_model_libraries)


def __getattr__(name: str) -> Any:
    if name in _ADAPTERS:
        globals()[name] = value = getattr(import_module(f".{_ADAPTERS[name]}", __name__), name)
        return value
    if name in __all__:
        for path in _MODULES:
            module = import_module(f".{path}", __name__)
            if hasattr(module, name):
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ADAPTERS})
