"""pw.load: as io.load, and able to tell whether what was loaded gives what it gave."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..io import loading
from ..io.config_files import folder_of
from ..io.errors import CheckpointError
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
    """Read a checkpoint of any format; return the model, or without one the state dict. What the arguments mean says
    :func:`pennyweight.io.load`, which this calls; there is one more:

    verify   run the filled model on the golden outputs beside the checkpoint (see :func:`golden`), and raise
             CheckpointError, with the figure and its bound, where it gives something else. The model is filled then

    Raises CheckpointError; all but that last one before anything in the model has changed.
    """
    if verify and model is None:
        raise ValueError("load(verify=True) runs the model; pass one, or leave verify out")
    expected = expected_beside(path) if verify else None  # a missing file costs no loading
    loaded = loading.load(
        path, model, strict=strict, device=device, dtype=dtype, names=names, allow_pickle=allow_pickle, mmap=mmap
    )
    if expected is not None:
        check(loaded, path, expected)
    return loaded


def expected_beside(path: str | os.PathLike[str]) -> Golden:
    """The golden outputs in a checkpoint's folder. Raises CheckpointError, with the remedy, where there are none."""
    folder = folder_of(os.fspath(path))
    if not os.path.isfile(os.path.join(folder, FILE)):
        raise CheckpointError(
            folder, None, f"holds no {FILE} to verify with; pw.golden(model, batches).save(folder) makes one, and so "
            "does pennyweight verify --make"
        )  # fmt: skip
    return Golden.load(folder)


def check(
    model: nn.Module, path: str | os.PathLike[str], expected: Golden | None = None, bound: float | None = None
) -> Verification:
    """What :func:`verify` finds of a loaded model and the golden outputs beside its checkpoint. Raises CheckpointError
    where it is beyond the bound, or the outputs have another shape."""
    try:
        return verify(model, expected or expected_beside(path), bound).check()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(path, None, str(error)) from error


def make(model: nn.Module, folder: str | os.PathLike[str], batches: Any) -> str:
    """Write the golden outputs of a checkpoint's own model beside it. Returns the path."""
    return golden(model, batches).save(folder_of(os.fspath(folder)))
