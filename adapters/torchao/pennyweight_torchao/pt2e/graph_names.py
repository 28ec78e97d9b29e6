"""Names of torchao that are called otherwise in :mod:`pennyweight_torchao.graph_mode`, and unions of types."""

from __future__ import annotations

from ..graph_mode.fake_quantize import FakeQuantizeBase
from ..graph_mode.inductor_quantizers import DEFAULT as default_quantizable_ops
from ..graph_mode.inductor_quantizers import MOVES_CODES as int8_in_int8_out_ops
from ..graph_mode.inductor_quantizers import QUANTIZABLE as quantizable_ops
from ..graph_mode.observer_base import ObserverBase, PartialWrapper
from ..graph_mode.specs import ANNOTATION as Q_ANNOTATION_KEY

__all__ = [
    "Q_ANNOTATION_KEY",
    "ObserverOrFakeQuantize",
    "ObserverOrFakeQuantizeConstructor",
    "default_quantizable_ops",
    "int8_in_int8_out_ops",
    "quantizable_ops",
]  # fmt: skip

ObserverOrFakeQuantize = ObserverBase | FakeQuantizeBase
ObserverOrFakeQuantizeConstructor = PartialWrapper | type[ObserverBase] | type[FakeQuantizeBase]
