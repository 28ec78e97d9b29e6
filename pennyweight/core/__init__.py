"""Number formats, specs and the tensor. Imports torch only; knows nothing of kernels, models or files."""

from . import tensor_ops  # registers the operations of the tensor

__all__ = ["tensor_ops"]
