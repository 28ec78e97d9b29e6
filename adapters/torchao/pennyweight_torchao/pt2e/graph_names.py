"""Names of torchao that are called otherwise in :mod:`pennyweight_torchao.graph_mode`, and unions of types."""

from __future__ import annotations

from ..graph_mode.fake_quantize import FakeQuantizeBase
from ..graph_mode.inductor_quantizers import DEFAULT as default_quantizable_ops
from ..graph_mode.inductor_quantizers import MOVES_CODES as int8_in_int8_out_ops
from ..graph_mode.inductor_quantizers import QUANTIZABLE as quantizable_ops
from ..graph_mode.inductor_quantizers import PatternAnnotation as _X86InductorQuantizationAnnotation
from ..graph_mode.numeric_debugger import source_of as _extract_node_source_debug_info
from ..graph_mode.observer_base import ObserverBase
from ..graph_mode.observer_base import UniformQuantizationObserverBase as _ObserverBase
from ..graph_mode.observer_base import bind as _with_args
from ..graph_mode.observer_base import bind_callable as _with_callable_args
from ..graph_mode.specs import ANNOTATION as Q_ANNOTATION_KEY
from ..graph_mode.xnnpack_annotators import scalars_to_constants as _convert_scalars_to_attrs

__all__ = [
    "Q_ANNOTATION_KEY", "ObserverOrFakeQuantize", "_ObserverBase", "_X86InductorQuantizationAnnotation",
    "_convert_scalars_to_attrs", "_extract_node_source_debug_info", "_with_args", "_with_callable_args",
    "default_quantizable_ops", "int8_in_int8_out_ops", "quantizable_ops",
]  # fmt: skip

ObserverOrFakeQuantize = ObserverBase | FakeQuantizeBase
