"""File I/O: reads and writes the native safetensors format and those of other libraries. Writes are atomic."""

from .convert_checkpoint import convert
from .detect_format import open
from .file import CheckpointError
from .hub import HubError, local_path, push_to_hub
from .lazy_checkpoint import Opened
from .loading import load
from .quantize_files import quantize_checkpoint
from .replace_checkpoint import replacing
from .saving import save
from .state_dict import flatten, unflatten

__all__ = [
    "CheckpointError",
    "HubError",
    "Opened",
    "convert",
    "flatten",
    "load",
    "local_path",
    "open",
    "push_to_hub",
    "quantize_checkpoint",
    "replacing",
    "save",
    "unflatten",
]
