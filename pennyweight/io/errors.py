"""The one exception of the readers and writers of files."""

from __future__ import annotations

import os


class CheckpointError(ValueError):
    """A checkpoint that cannot be accepted (or written), whole.

    path: the file; tensor: the tensor at fault, or None where it is the file itself; reason: what is wrong, what was
    expected. No other exception leaves a reader.
    """

    def __init__(self, path: str | os.PathLike[str] | None, tensor: str | None, reason: str) -> None:
        self.path = None if path is None else os.fspath(path)
        self.tensor = tensor
        self.reason = reason
        super().__init__(self.path, tensor, reason)

    def __str__(self) -> str:
        # a name from a file may be long or hold control characters: show it as Python would, cut
        name = None if self.tensor is None else self.tensor if self.tensor.isprintable() else ascii(self.tensor)
        name = name if name is None or len(name) <= 200 else f"{name[:200]}..."
        return ": ".join(part for part in (self.path or "checkpoint", name, self.reason) if part)
