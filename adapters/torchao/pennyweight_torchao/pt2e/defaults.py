"""Observers and fake quantizers with torchao's default arguments, and their states in a state dict."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ..graph_mode.fake_quantize import FakeQuantize, FixedQParamsFakeQuantize, FusedMovingAvgObsFakeQuantize
from ..graph_mode.histogram_observer import HistogramObserver
from ..graph_mode.passive_observers import (
    FixedQParamsObserver,
    PlaceholderObserver,
    RecordingObserver,
    ReuseInputObserver,
)
from ..graph_mode.prepare_graph import OBSERVERS
from ..graph_mode.range_observers import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)

_INT8: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
_INT8_CHANNELS: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
_FULL: dict[str, Any] = {"quant_min": -128, "quant_max": 127}
_NO_128: dict[str, Any] = {"quant_min": -127, "quant_max": 127, "eps": 2**-12}
_UINT8: dict[str, Any] = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
_ROWS: dict[str, Any] = {"qscheme": torch.per_channel_affine_float_qparams, "ch_axis": 0}
_REDUCED: dict[str, Any] = {**_UINT8, "qscheme": torch.per_tensor_affine, "reduce_range": True}

default_observer = MinMaxObserver.with_args(quant_min=0, quant_max=127)
default_placeholder_observer = PlaceholderObserver
default_debug_observer = RecordingObserver
default_weight_observer = MinMaxObserver.with_args(**_INT8)
weight_observer_range_neg_127_to_127 = MinMaxObserver.with_args(**_INT8, **_NO_128)
default_histogram_observer = HistogramObserver.with_args(quant_min=0, quant_max=127)
default_per_channel_weight_observer = PerChannelMinMaxObserver.with_args(**_INT8_CHANNELS)
per_channel_weight_observer_range_neg_127_to_127 = PerChannelMinMaxObserver.with_args(**_INT8_CHANNELS, **_NO_128)
default_dynamic_quant_observer = PlaceholderObserver.with_args(**_UINT8, is_dynamic=True)
default_float_qparams_observer = PerChannelMinMaxObserver.with_args(dtype=torch.quint8, **_ROWS)
default_float_qparams_observer_4bit = PerChannelMinMaxObserver.with_args(dtype=torch.quint4x2, **_ROWS)
default_fixed_qparams_range_neg1to1_observer = FixedQParamsObserver.with_args(scale=2 / 256, zero_point=128, **_UINT8)
default_fixed_qparams_range_0to1_observer = FixedQParamsObserver.with_args(scale=1 / 256, zero_point=0, **_UINT8)
default_symmetric_fixed_qparams_observer = default_fixed_qparams_range_neg1to1_observer
default_affine_fixed_qparams_observer = default_fixed_qparams_range_0to1_observer
default_reuse_input_observer = ReuseInputObserver

default_fake_quant = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **_REDUCED)
default_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, **_FULL, **_INT8, reduce_range=False
)
default_dynamic_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, **_UINT8, is_dynamic=True, averaging_constant=1
)
default_fixed_qparams_range_neg1to1_fake_quant = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_neg1to1_observer
)
default_fixed_qparams_range_0to1_fake_quant = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_0to1_observer
)
default_symmetric_fixed_qparams_fake_quant = default_fixed_qparams_range_neg1to1_fake_quant
default_affine_fixed_qparams_fake_quant = default_fixed_qparams_range_0to1_fake_quant
default_per_channel_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, **_FULL, **_INT8_CHANNELS, reduce_range=False, ch_axis=0
)
default_embedding_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, **_UINT8, **_ROWS, averaging_constant=1
)
default_embedding_fake_quant_4bit = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, dtype=torch.quint4x2, **_ROWS, averaging_constant=1
)
default_histogram_fake_quant = FakeQuantize.with_args(observer=HistogramObserver, **_REDUCED)
default_fused_act_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **_UINT8)
default_fused_wt_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, **_FULL, **_INT8
)
default_fused_per_channel_wt_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, **_FULL, **_INT8_CHANNELS
)
fused_wt_fake_quant_range_neg_127_to_127 = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, **_INT8, **_NO_128
)
fused_per_channel_wt_fake_quant_range_neg_127_to_127 = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver, **_INT8_CHANNELS, **_NO_128
)


def _is_activation_post_process(module: Any) -> bool:
    return isinstance(module, OBSERVERS)


def get_observer_state_dict(mod: nn.Module) -> OrderedDict[str, Any]:
    """The entries of a state dict that belong to observers of a prepared model."""
    state = mod.state_dict()
    found: OrderedDict[str, Any] = OrderedDict((k, v) for k, v in state.items() if "activation_post_process" in k)
    found._metadata = state._metadata  # type: ignore[attr-defined]
    return found


def load_observer_state_dict(mod: nn.Module, obs_dict: OrderedDict[str, Any]) -> None:
    """Load what :func:`get_observer_state_dict` returned. Raises RuntimeError for missing or unexpected entries."""
    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    metadata = getattr(obs_dict, "_metadata", {})
    for name, module in mod.named_modules():
        if isinstance(module, OBSERVERS):
            module._load_from_state_dict(
                obs_dict, f"{name}.", metadata.get(name, {}), True, missing, unexpected, errors
            )
    if missing or unexpected or errors:
        raise RuntimeError(f"Missing keys for observer {missing}, unexpected keys {unexpected} in state_dict; {errors}")


__all__ = [name for name in dir() if name.startswith(("default_", "weight_", "per_channel_", "fused_"))]
__all__ += ["_is_activation_post_process", "get_observer_state_dict", "load_observer_state_dict"]
