"""The exception of the file readers and writers."""

from __future__ import annotations

import os


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
