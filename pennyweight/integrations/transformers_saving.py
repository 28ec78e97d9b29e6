"""transformers models quantized in place: ``save_pretrained`` writes them like models quantized on load."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.tensor import AffineQuantizedTensor
from ..planning.configs import AOBaseConfig
from .transformers import PennyweightConfig
from .transformers_quantizer import PennyweightQuantizer


def settle_(model: Any, quantized: bool, config: Any = None) -> None:
    """Attach the quantizer that ``save_pretrained`` needs, or remove it if nothing is quantized any more.

    config: the config used for quantizing, for config.json. Another library's quantizer is kept, and so is one of ours
    that loaded the model.
    """
    held = getattr(model, "hf_quantizer", None)
    if quantized and held is None:
        model.hf_quantizer = InPlaceQuantizer(PennyweightConfig(config if isinstance(config, AOBaseConfig) else None))
    elif quantized and isinstance(held, InPlaceQuantizer) and held.quantization_config.config != config:
        save_as = held.quantization_config.save_as
        held.quantization_config = PennyweightConfig(save_as=save_as)  # quantized with several configs
    elif not quantized and isinstance(held, PennyweightQuantizer):
        held.remove_quantization_config(model)


class InPlaceQuantizer(PennyweightQuantizer):
    """Affects only how the model is saved, and only while it has quantized weights."""

    conversions: Any = None  # the model's own; not undone when quantized weights are saved

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return super().get_state_dict_and_metadata(model)
        if not any(isinstance(t, AffineQuantizedTensor) for t in model.state_dict().values()):
            self.remove_quantization_config(model)
            return None, {}
        if self.conversions is None:
            self.conversions = getattr(model, "_weight_conversions", None)
        self.postprocess_model(model)
        return super().get_state_dict_and_metadata(model)

    def remove_quantization_config(self, model: Any) -> None:
        super().remove_quantization_config(model)
        if self.conversions is not None:
            model._weight_conversions = self.conversions
