"""Registers the method "pennyweight" with transformers when it is imported, which the first folder of ours does."""

from __future__ import annotations

from ...io.config_files import METHOD
from ...io.meta_model import load_tokenizer
from .config import PennyweightConfig
from .loading import load_pretrained
from .quantizer import PennyweightQuantizer
from .saving import InPlaceQuantizer, attach_quantizer, mark_written_configs, settle_, write_cards_of_uploads

__all__ = [
    "InPlaceQuantizer", "PennyweightConfig", "PennyweightQuantizer", "attach_quantizer", "load_pretrained",
    "load_tokenizer", "register", "settle_",
]  # fmt: skip


def register() -> None:
    """Register both classes with transformers. A re-imported module replaces its older version."""
    from transformers.quantizers import auto  # not above: it may have been imported anew

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD, None)
    auto.AUTO_QUANTIZER_MAPPING.pop(METHOD, None)
    auto.register_quantization_config(METHOD)(PennyweightConfig)
    auto.register_quantizer(METHOD)(PennyweightQuantizer)


register()
mark_written_configs()
write_cards_of_uploads()
