"""Number formats, specs and the tensor. Imports torch only; knows nothing of kernels, models or files."""

from . import axes, cuts, inplace, search, tensor_ops  # register the operations of the tensor, and a rule

__all__ = ["axes", "cuts", "inplace", "search", "tensor_ops"]
