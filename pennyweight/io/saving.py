"""pw.save: a model or state dict to safetensors, sharded, each file whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn

from .checkpoint import INDEX
from .container import place
from .errors import CheckpointError
from .native import Item, items, metadata_of
from .shards import MAX_SHARD_BYTES, divide, remove_stale, shard_names
from .slots import slots_of
from .write import Writer, index_bytes, publish, sync_folder, temporary, write_bytes


def save(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model's state dict (or a state dict) in the format of docs/format.md.

    path             a folder; or one file, where it ends in .safetensors; folders are made if need be
    max_shard_bytes  a folder gets as many files as this asks for, and an index
    metadata         strings of your own to keep in each file

    Files are written beside their places and renamed when all are complete, the index last; an error leaves what was
    there before. Files of an older checkpoint in the folder are removed. Raises CheckpointError naming a tensor that
    cannot be stored, and OSError where the disk refuses.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps a module and would put its own prefix on names
    state_dict = _state_dict(model) if isinstance(model, nn.Module) else model
    path = os.path.abspath(os.fspath(path))
    try:
        some = items(state_dict)
        if path.endswith(".safetensors"):
            folder, name = os.path.split(path)
            with _made(folder):
                _write_all(folder, [name], [some], metadata, whole_folder=False)
            return
        shards = divide(some, max_shard_bytes)
        names = shard_names(len(shards))
        with _made(path):
            _write_all(path, names, shards, metadata, whole_folder=True)
        remove_stale(path, [*names, INDEX] if len(shards) > 1 else names)
        sync_folder(path)
    except CheckpointError as e:
        raise CheckpointError(path, e.tensor, e.reason) from e


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, and weights that some library left as plain tensors, which it does not list."""
    out = model.state_dict()
    return out | {name: slot.tensor for name, slot in slots_of(model).items() if name not in out}


@contextmanager
def _made(folder: str) -> Iterator[None]:
    """The folder, made if need be, and unmade on an error if nothing else was put there."""
    made = not os.path.isdir(folder)
    os.makedirs(folder, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            with suppress(OSError):
                os.rmdir(folder)
        raise


def _write_all(
    folder: str,
    names: list[str],
    shards: list[list[Item]],
    metadata: Mapping[str, str] | None,
    whole_folder: bool,
) -> None:
    """Write every shard under a temporary name, then rename all; the index, which makes them a checkpoint, last."""
    with ExitStack() as stack:
        temps = [stack.enter_context(temporary(folder, name)) for name in names]
        for temp, shard in zip(temps, shards, strict=True):
            _write_file(temp, shard, metadata)
        if whole_folder:
            # Between the renames the folder holds parts of two checkpoints: without an index nobody takes them for one.
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, INDEX))
        for temp, name in zip(temps, names, strict=True):
            publish(temp, os.path.join(folder, name))
        if len(names) > 1:
            weight_map = {
                s: name for name, shard in zip(names, shards, strict=True) for item in shard for s in item.stored
            }
            total = sum(item.nbytes for shard in shards for item in shard)
            write_bytes(os.path.join(folder, INDEX), index_bytes(weight_map, total))


def _write_file(path: str, shard: list[Item], metadata: Mapping[str, str] | None) -> None:
    entries = place({name: kind for item in shard for name, kind in item.stored.items()})
    writer = Writer(path, entries, metadata_of(shard, metadata))
    try:
        for item in shard:
            for name, start, tensor in item.make():
                writer.put(name, tensor, start)
        writer.finish()
    finally:
        writer.close()
