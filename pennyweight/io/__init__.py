"""Files: the native safetensors format, read and written whole or not at all. See docs/format.md."""

from .errors import CheckpointError
from .loading import load
from .native import flatten, unflatten
from .quantize_files import quantize_checkpoint
from .saving import save

__all__ = ["CheckpointError", "flatten", "load", "quantize_checkpoint", "save", "unflatten"]
