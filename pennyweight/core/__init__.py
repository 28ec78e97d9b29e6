"""Number formats, specs and the tensor. Imports torch only; knows nothing of kernels, models or files."""

from . import axes, cuts, inplace, tensor_ops  # register the operations of the tensor

__all__ = ["axes", "cuts", "inplace", "tensor_ops"]
