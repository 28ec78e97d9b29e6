"""Quantization of exported graphs by annotations, as ``quantize`` and ``dequantize`` operators: torchao's PT2E.

``torch.export.export(model, inputs).module()`` -> :func:`prepare` with a :class:`Quantizer` -> run on sample data, or
train -> :func:`convert` -> run, compile, export again, or :func:`pennyweight.lower`.
"""

from .annotate import annotate_input_qspec_map, annotate_output_qspec
from .convert_graph import convert
from .embedding_quantizer import EmbeddingQuantizer
from .fake_quantize import FakeQuantize, FixedQParamsFakeQuantize, FusedMovingAvgObsFakeQuantize
from .histogram_observer import HistogramObserver
from .inductor_configs import (
    ArmInductorQuantizer,
    get_default_arm_inductor_quantization_config,
    get_default_x86_inductor_quantization_config,
)
from .inductor_quantizers import X86InductorQuantizer
from .passive_observers import FixedQParamsObserver, PlaceholderObserver
from .prepare_graph import prepare, prepare_qat
from .range_observers import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from .specs import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)
from .train_eval import allow_exported_model_train_eval, move_exported_model_to_eval, move_exported_model_to_train
from .xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

__all__ = [
    "ArmInductorQuantizer",
    "ComposableQuantizer",
    "DerivedQuantizationSpec",
    "EmbeddingQuantizer",
    "FakeQuantize",
    "FixedQParamsFakeQuantize",
    "FixedQParamsObserver",
    "FixedQParamsQuantizationSpec",
    "FusedMovingAvgObsFakeQuantize",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "QuantizationAnnotation",
    "QuantizationConfig",
    "QuantizationSpec",
    "Quantizer",
    "SharedQuantizationSpec",
    "X86InductorQuantizer",
    "XNNPACKQuantizer",
    "allow_exported_model_train_eval",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "convert",
    "get_default_arm_inductor_quantization_config",
    "get_default_x86_inductor_quantization_config",
    "get_symmetric_quantization_config",
    "move_exported_model_to_eval",
    "move_exported_model_to_train",
    "prepare",
    "prepare_qat",
]
