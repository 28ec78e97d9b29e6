"""Files: the native safetensors format, and those of other libraries, read and written whole or not at all."""

from .converting import convert
from .detect import open
from .errors import CheckpointError
from .loading import load
from .native import flatten, unflatten
from .opened import Opened
from .quantize_files import quantize_checkpoint
from .replace_folder import replacing
from .saving import save

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
