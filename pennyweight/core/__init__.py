"""Number formats, specs and the quantized tensor. Imports torch only: independent of kernels, models and files."""

from . import (  # imported to register handlers, texts, a reducer and a rule
    distributed_hooks,
    load_state_dict,
    model_arguments,
    multiprocessing_reducer,
    qparams_search,
)
from .ops import inplace, parts, slice, view

__all__ = [
    "distributed_hooks",
    "inplace",
    "load_state_dict",
    "model_arguments",
    "multiprocessing_reducer",
    "parts",
    "qparams_search",
    "slice",
    "view",
]
