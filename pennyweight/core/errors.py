"""The exception for arguments that do not fit a quantized tensor."""

from __future__ import annotations


class ArgumentError(ValueError, RuntimeError):
    """An operation was given a shape, dtype, device or layout that does not fit the quantized tensor.

    Where a float tensor is given the same arguments torch raises RuntimeError, so code that catches that works here.
    """
