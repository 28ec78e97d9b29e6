"""The exceptions for arguments, of a wrong type or with values that do not fit, for checkpoints, and for what is not
done."""

from __future__ import annotations

import os


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


class CheckpointError(ValueError):
    """A checkpoint is invalid or cannot be written. Nothing is loaded or written in part.

    path: the file; tensor: the invalid tensor, or None if the file itself is invalid; reason: what is wrong and what
    was expected. Readers raise no other exception.
    """

    def __init__(self, path: str | os.PathLike[str] | None, tensor: str | None, reason: str) -> None:
        self.path = None if path is None else os.fspath(path)
        self.tensor = tensor
        self.reason = reason
        super().__init__(self.path, tensor, reason)

    def __str__(self) -> str:
        # a name from a file may be long or hold control characters: escape and truncate it
        name = None if self.tensor is None else self.tensor if self.tensor.isprintable() else ascii(self.tensor)
        name = name if name is None or len(name) <= 200 else f"{name[:200]}..."
        return ": ".join(part for part in (self.path or "checkpoint", name, self.reason) if part)
