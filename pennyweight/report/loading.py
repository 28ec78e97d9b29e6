"""pw.load: io.load with optional verification against golden outputs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..io import loading
from ..io.config_files import folder_of
from ..io.file import CheckpointError
from .golden_outputs import FILE, Golden, Verification, golden, verify


def load(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    names: str | os.PathLike[str] | None = None,
    allow_pickle: bool = False,
    mmap: bool = True,
    verify: bool = False,
) -> Any:
    """Read a checkpoint of any format; return the model, or the state dict if no model is passed. The other arguments
    are those of :func:`pennyweight.io.load`, which this calls:

    verify   run the loaded model on the golden outputs next to the checkpoint (see :func:`golden`), and raise
             CheckpointError, with the value and its bound, if the outputs differ. The model is already filled then

    Raises CheckpointError; all others are raised before anything in the model has changed.
    """
    if verify and model is None:
        raise ValueError("load(verify=True) runs the model; pass one, or leave verify out")
    expected = expected_beside(path) if verify else None  # fail before loading if the file is missing
    loaded = loading.load(
        path, model, strict=strict, device=device, dtype=dtype, names=names, allow_pickle=allow_pickle, mmap=mmap
    )
    if expected is not None:
        check(loaded, path, expected)
    return loaded


def expected_beside(path: str | os.PathLike[str]) -> Golden:
    """The golden outputs in a checkpoint's folder. Raises CheckpointError with a remedy if there are none."""
    folder = folder_of(os.fspath(path))
    if not os.path.isfile(os.path.join(folder, FILE)):
        raise CheckpointError(
            folder, None, f"has no {FILE} to verify with; create one with pw.golden(model, batches).save(folder) or "
            "pennyweight verify --make"
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
