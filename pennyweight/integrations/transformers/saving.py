"""``save_pretrained`` and ``push_to_hub`` of models quantized in place: as of models quantized while loading."""

from __future__ import annotations

import functools
import os
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import PushToHubMixin

from ...core.tensor import AffineQuantizedTensor
from ...io.atomic_write import write_bytes
from ...io.config_files import METHOD, NO_SUCH_FILE, WEIGHTS_KEY
from ...io.hub import is_hub_id, uploaded_card
from ...io.model_card import CARD, MAX_CARD_BYTES, is_generated
from ...io.strict_json import read_bytes
from ...planning.configs import AOBaseConfig
from .config import PennyweightConfig
from .quantizer import PennyweightQuantizer


def attach_quantizer(model: Any, config: AOBaseConfig | str | None = None, *, save_as: str = "pennyweight") -> Any:
    """Enable ``save_pretrained`` and ``dequantize`` of a transformers model quantized with ``pw.quantize_``.

    config: the config used, for config.json. save_as: as for PennyweightConfig. Returns the model.
    """
    quantizer = PennyweightQuantizer(PennyweightConfig(config, save_as=save_as), pre_quantized=True)
    model.is_quantized, model.quantization_method = True, quantizer.quantization_config.quant_method
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
    return model


def settle_(model: Any, quantized: bool, config: Any = None) -> None:
    """Attach the quantizer that ``save_pretrained`` needs, or remove it if nothing is quantized any more.

    config: the config used for quantizing, for config.json. Another library's quantizer is kept, and so is one of ours
    that loaded the model.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantized and quantizer is None:
        model.hf_quantizer = InPlaceQuantizer(PennyweightConfig(config if isinstance(config, AOBaseConfig) else None))
    elif quantized and isinstance(quantizer, InPlaceQuantizer) and quantizer.quantization_config.config != config:
        save_as = quantizer.quantization_config.save_as
        quantizer.quantization_config = PennyweightConfig(save_as=save_as)  # quantized with several configs
    elif not quantized and isinstance(quantizer, PennyweightQuantizer):
        quantizer.remove_quantization_config(model)


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


# -- what is written to config.json and to model cards -----------------------------------------------------------------


def mark_written_configs() -> None:
    """Mark config.json of a model with our weights for processes that do not know METHOD: see NO_SUCH_FILE.

    Patches the method with which PreTrainedConfig.save_pretrained creates the file, before weights are written or
    uploaded: transformers has no hook for it.
    """
    plain: Any = getattr(PreTrainedConfig.to_diff_dict, "__wrapped__", PreTrainedConfig.to_diff_dict)

    @functools.wraps(plain)
    def to_diff_dict(self: Any) -> dict[str, Any]:
        out = plain(self)
        if (out.get("quantization_config") or {}).get("quant_method") == METHOD:
            out[WEIGHTS_KEY] = NO_SUCH_FILE
        return out

    PreTrainedConfig.to_diff_dict = to_diff_dict  # type: ignore[method-assign]


# transformers' own card for a model without one; its text has no other mark
_TEMPLATE = "This model card has been automatically generated"


def write_cards_of_uploads() -> None:
    """Upload our model card with a quantized model, instead of the empty one that ``push_to_hub`` generates.

    Patches the method that uploads the files of a saved model: transformers has no hook for it.
    """
    plain: Any = getattr(PushToHubMixin, "_upload_modified_files", None)
    plain = getattr(plain, "__wrapped__", plain)
    if plain is None:  # a release that uploads otherwise
        return

    @functools.wraps(plain)
    def upload(self: Any, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> Any:
        path, quantizer = os.path.join(working_dir, CARD), getattr(self, "hf_quantizer", None)
        if isinstance(quantizer, PennyweightQuantizer) and os.path.isfile(path):
            text = read_bytes(path, MAX_CARD_BYTES)
            if is_generated(text) or _TEMPLATE.encode() in text:
                loaded = quantizer.pre_quantized and not isinstance(quantizer, InPlaceQuantizer)
                name = "" if loaded else getattr(self.config, "name_or_path", "")
                base = name if is_hub_id(name) and not os.path.exists(name) else ""
                report = getattr(quantizer, "report", None)
                write_bytes(path, uploaded_card(working_dir, repo_id, text, base=base, report=report))
        return plain(self, working_dir, repo_id, *args, **kwargs)

    PushToHubMixin._upload_modified_files = upload
