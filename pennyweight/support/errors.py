"""The exceptions for arguments, of a wrong type or with values that do not fit, and the reason for what is not done."""

from __future__ import annotations


class ArgumentError(ValueError, RuntimeError):
    """An operation was given a shape, dtype, device or layout that does not fit the quantized tensor, or a model was
    given a batch that it cannot run on.

    torch raises RuntimeError for the same arguments on a float tensor, so code that catches RuntimeError works here.
    """


class Refusal(Exception):
    """Why something is not done; the message is the reason.

    A block or net is not fused, native code does not run a step, a layer of a graph is not lowered. Raised and caught
    within the package, which leaves that part of the model as it is.
    """


class ArgumentTypeError(TypeError, ValueError):
    """An argument has a wrong type: a path instead of a model, a class instead of an instance.

    Also a ValueError, so that code that catches ValueError around a call sees every invalid argument.
    """
