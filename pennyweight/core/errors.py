"""The exception for arguments that do not fit a quantized tensor."""

from __future__ import annotations


class ArgumentError(ValueError, RuntimeError):
    """An operation was given a shape, dtype, device or layout that does not fit the quantized tensor.

    torch raises RuntimeError for the same arguments on a float tensor, so code that catches RuntimeError works here.
    """
