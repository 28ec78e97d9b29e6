"""File I/O: reads and writes the native safetensors format and those of other libraries. Writes are atomic."""

from .convert_checkpoint import convert
from .detect_format import open
from .file import CheckpointError
from .lazy_checkpoint import Opened
from .loading import load
from .quantize_files import quantize_checkpoint
from .replace_checkpoint import replacing
from .saving import save
from .state_dict import flatten, unflatten

__all__ = [
    "CheckpointError",
    "Opened",
    "convert",
    "flatten",
    "load",
    "open",
    "quantize_checkpoint",
    "replacing",
    "save",
    "unflatten",
]
