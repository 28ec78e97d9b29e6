"""Number formats, specs and the quantized tensor. Imports torch only: independent of kernels, models and files."""

from . import distributed_hooks, load_state_dict, qparams_search  # imported to register handlers and a rule
from .ops import inplace, parts, slice, view

__all__ = ["distributed_hooks", "inplace", "load_state_dict", "parts", "qparams_search", "slice", "view"]
