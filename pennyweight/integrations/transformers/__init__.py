"""transformers: ``quantization_config=PennyweightConfig("int4")``, and our folders in ``from_pretrained``; loading of
other folders, and saving of models quantized by hand.

``import pennyweight`` registers the method "pennyweight" (entry.py). The names are imported at first use (adapter.py):
the entry and the command (``python -m pennyweight.integrations.transformers``) need none of transformers' classes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapter import PennyweightConfig, PennyweightQuantizer, attach_quantizer, load_pretrained, load_tokenizer

__all__ = ["PennyweightConfig", "PennyweightQuantizer", "attach_quantizer", "load_pretrained", "load_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".adapter", __name__), name)
