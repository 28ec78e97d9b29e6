"""Number formats, specs and the quantized tensor. Imports torch only: independent of kernels, models and files."""

from . import load_state_dict, qparams_search  # imported to register handlers and a rule
from .distributed import dispatch
from .ops import inplace, parts, slice, view

__all__ = ["dispatch", "inplace", "load_state_dict", "parts", "qparams_search", "slice", "view"]
