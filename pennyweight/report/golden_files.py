"""The golden outputs that lie beside a checkpoint: found, checked and written."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..io.config_files import folder_of
from ..io.file import CheckpointError, no_such_path
from .golden_outputs import FILE, Golden, Verification, golden, verify


def expected_beside(path: str | os.PathLike[str]) -> Golden:
    """The golden outputs in a checkpoint's folder. Raises CheckpointError with a remedy if there are none."""
    path = os.fspath(path)
    if not os.path.lexists(path):
        raise CheckpointError(path, None, f"there is no such file or folder{no_such_path(path)}")
    folder = folder_of(path)
    if not os.path.isfile(os.path.join(folder, FILE)):
        raise CheckpointError(
            folder, None, f"has no {FILE} to verify with; create one with pw.report.golden(model, batches)"
            ".save(folder) or pennyweight verify --make"
        )  # fmt: skip
    return Golden.load(folder)


def check(
    model: nn.Module, path: str | os.PathLike[str], expected: Golden | None = None, bound: float | None = None
) -> Verification:
    """:func:`verify` a loaded model with the golden outputs next to its checkpoint. Raises CheckpointError if the
    result exceeds the bound, or the outputs have another shape."""
    try:
        return verify(model, expected or expected_beside(path), bound).check()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(path, None, str(error)) from error


def make(model: nn.Module, folder: str | os.PathLike[str], batches: Any) -> str:
    """Write the golden outputs of a checkpoint's model into its folder. Returns the path."""
    return golden(model, batches).save(folder_of(os.fspath(folder)))
