"""Number formats, specs and the tensor. Imports torch only; knows nothing of kernels, models or files."""

from . import (  # register the operations of the tensor, and a rule
    axes,
    callers,
    cuts,
    inplace,
    loading,
    search,
    tensor_ops,
)

__all__ = ["axes", "callers", "cuts", "inplace", "loading", "search", "tensor_ops"]
