# ruff: noqa: F405
"""Pennyweight: quantization of PyTorch models.

    plan, quantize_, dequantize_     what would be quantized; quantize in place; undo
    recommend, search                the fastest config that fits; the best mixture within a budget
    calibrate                        static scales of inputs
    save, load, open, convert        files: our own, and those of other libraries
    compare, report.verify           what was lost; whether a file still computes the same
    fuse_, explain                   faster calls, and which kernel runs

Each has a docstring; the pages of docs/ begin with docs/index.md.

What happens is recorded by :mod:`logging`, under loggers of the modules' names: INFO for what a function did (quantized
layers, kernel library, fallbacks to dequantized weights, resumed runs, loaded and saved files), DEBUG for each layer.
Nothing is shown unless the program asks for it::

    logging.basicConfig()
    logging.getLogger("pennyweight").setLevel(logging.INFO)
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .support.version import __version__

if TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import distributed as distributed
    from . import export as export
    from . import inference as inference
    from . import integrations as integrations
    from . import io as io
    from . import kernels as kernels
    from . import optim as optim
    from . import report as report
    from . import training as training
    from .algorithms import AccuracyWarning, calibrate, search, sparsify_
    from .core.fallback import FallbackError, FallbackWarning, fallbacks, reset_fallbacks
    from .core.formats import Format, get_format
    from .core.spec import ActivationSpec, QuantSpec
    from .core.tensor import AffineQuantizedTensor
    from .export.lower_graph import lower
    from .inference import Recommendation, explain, fuse_, recommend
    from .integrations.transformers import PennyweightConfig as PennyweightConfig
    from .io import CheckpointError, Opened, convert, load, open, push_to_hub, quantize_checkpoint, save
    from .planning.configs import *  # noqa: F403
    from .planning.configs.floating import (
        float8_dynamic_activation_float8_weight as float8_dynamic_activation_float8_weight,
    )
    from .planning.configs.floating import (
        float8_static_activation_float8_weight as float8_static_activation_float8_weight,
    )
    from .planning.configs.floating import (
        float8_weight_only as float8_weight_only,
    )
    from .planning.configs.floating import (
        fpx_weight_only as fpx_weight_only,
    )
    from .planning.configs.integer import (
        int4_weight_only as int4_weight_only,
    )
    from .planning.configs.integer import (
        int8_dynamic_activation_int4_weight as int8_dynamic_activation_int4_weight,
    )
    from .planning.configs.integer import (
        int8_dynamic_activation_int8_weight as int8_dynamic_activation_int8_weight,
    )
    from .planning.configs.integer import (
        int8_static_activation_int8_weight as int8_static_activation_int8_weight,
    )
    from .planning.configs.integer import (
        int8_weight_only as int8_weight_only,
    )
    from .planning.configs.integer import (
        intx_weight_only as intx_weight_only,
    )
    from .planning.configs.integer import (
        uintx_weight_only as uintx_weight_only,
    )
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
    from .report import Comparison, compare
    from .support.errors import ArgumentError
    from .training import QATConfig

__all__ = [
    "AOBaseConfig",
    "AccuracyWarning",
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
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
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
    "__version__",
    "calibrate",
    "compare",
    "convert",
    "dequantize_",
    "explain",
    "fallbacks",
    "fuse_",
    "get_format",
    "load",
    "lower",
    "open",
    "plan",
    "push_to_hub",
    "quantize_",
    "quantize_checkpoint",
    "recommend",
    "register_quantize_module_handler",
    "reset_fallbacks",
    "save",
    "search",
    "sparsify_",
]

# Records go where the program sends them: without a handler of its own, nowhere
logging.getLogger(__name__).addHandler(logging.NullHandler())

# What `import pennyweight` imports at once is in startup.py. The rest is imported at first use, because it would more
# than double the import time.
_MODULES: tuple[str, ...] = (
    "planning.configs", "planning.granularity", "quantize", "inference", "algorithms", "training", "report", "io",
)  # fmt: skip
# Names whose module is known without importing others. PennyweightConfig is not in __all__: `from pennyweight import *`
# must not need its library.
_HOMES = {
    "ActivationSpec": "core.spec", "AffineQuantizedTensor": "core.tensor", "ArgumentError": "support.errors",
    "FallbackError": "core.fallback", "FallbackWarning": "core.fallback", "Format": "core.formats",
    "PennyweightConfig": "integrations.transformers", "QuantSpec": "core.spec", "fallbacks": "core.fallback",
    "get_format": "core.formats", "lower": "export.lower_graph", "reset_fallbacks": "core.fallback",
}  # fmt: skip
# Public folders, imported at first use: pw.report.verify, pw.optim.AdamW8bit
_FOLDERS = (
    "algorithms", "distributed", "export", "inference", "integrations", "io", "kernels", "optim", "report", "training",
)  # fmt: skip
# torchao's names of configs before 0.10: promised for ever, and not shown
_ALIASES = {
    **dict.fromkeys(
        ("float8_dynamic_activation_float8_weight", "float8_static_activation_float8_weight", "float8_weight_only",
         "fpx_weight_only"),
        "planning.configs.floating",
    ),
    **dict.fromkeys(
        ("int4_weight_only", "int8_dynamic_activation_int4_weight", "int8_dynamic_activation_int8_weight",
         "int8_static_activation_int8_weight", "int8_weight_only", "intx_weight_only", "uintx_weight_only"),
        "planning.configs.integer",
    ),
}  # fmt: skip


def _is_command() -> bool:
    """Whether Python was started as ``pennyweight ...`` or ``python -m pennyweight ...``.

    The command imports torch when a command runs, so that --help and completion start at once. Only Python's own
    arguments count: a child process of the command has others, and needs all that an import gives.
    """
    script = sys.argv[0] if getattr(sys, "argv", None) else ""
    started = sys.orig_argv
    if "torch" in sys.modules or script not in started:
        return False
    if script == "-m":  # runpy has not replaced it yet: it is importing this package
        return started[started.index("-m") + 1 :][:1] == [__name__]
    return os.path.basename(script).removesuffix(".exe") == __name__


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        import_module(".startup", __name__)
        return import_module(f".{name}", __name__)
    if name in __all__ or name in _HOMES or name in _ALIASES:
        import_module(".startup", __name__)
        known = _HOMES.get(name) or _ALIASES.get(name)
        for path in [known] if known else _MODULES:
            try:
                module = import_module(f".{path}", __name__)
            except ModuleNotFoundError as error:
                if error.name != "transformers":
                    raise
                from .support.extras import install

                text = f"pennyweight.{name} needs transformers: {install('hf')}"
                raise ImportError(text, name=error.name) from error
            if hasattr(module, name):
                globals()[name] = value = getattr(module, name)
                return value
    guess = ""
    if not name.startswith("_"):
        from .support.arguments import did_you_mean

        folders = [import_module(f".{folder}", __name__) for folder in _FOLDERS]
        inside = [folder.__name__ for folder in folders if name in getattr(folder, "__all__", ())]
        guess = f"; it is {inside[0]}.{name}" if inside else did_you_mean(name, __all__, 3, 0.6)
        if name in ("bench", "benchmark"):
            guess = "; quantize_(..., measure=True) times layers, the command pennyweight doctor --bench this machine"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{guess}")


def __dir__() -> list[str]:
    own = {name for name, value in globals().items() if getattr(value, "__name__", "").startswith(f"{__name__}.")}
    own -= _ALIASES.keys()
    shown = {*own, *__all__, *_HOMES, *_FOLDERS}
    return sorted({*shown, "__version__", "__doc__", "__all__", "__path__", "__file__", "__name__"})


if not _is_command():
    import_module(".startup", __name__)
