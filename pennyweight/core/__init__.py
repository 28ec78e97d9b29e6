"""Number formats, specs and the tensor. Imports torch only; knows nothing of kernels, models or files."""

from . import load_state_dict, qparams_search  # registers functions of the tensor, and a rule
from .distributed import dispatch
from .ops import inplace, parts, slice, view

__all__ = ["dispatch", "inplace", "load_state_dict", "parts", "qparams_search", "slice", "view"]
