"""pw.save: a model or state dict to safetensors, sharded, each file whole or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from .atomic_write import Writer, make_folders, partial_path, remove_left_over, rename_into_place, write_bytes
from .config_files import marked_config
from .errors import CheckpointError
from .replace_checkpoint import replace_checkpoint
from .safetensors_file import place
from .shard_plan import MAX_SHARD_BYTES, assign_shards
from .state_dict import Item, items, metadata_of
from .state_dict_slots import slots_of


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

    A reader finds the old checkpoint or the new one, whole, at any moment, and so after a crash: files are written
    beside their places and renamed when all are complete, to names that no older checkpoint has, the index last; then
    files of an older checkpoint in the folder are removed. An error leaves what was there before. Of several writers
    at once the last to finish wins. Raises CheckpointError naming a tensor that cannot be stored, and OSError where
    the disk refuses. A config.json of transformers in the folder gets a "quantization_config", so that nobody takes
    quantized weights for missing ones.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps a module and would put its own prefix on names
    state_dict = _state_dict(model) if isinstance(model, nn.Module) else model
    path = os.path.abspath(os.fspath(path))
    try:
        some = items(state_dict)
        if path.endswith(".safetensors"):
            folder, name = os.path.split(path)
            with make_folders(folder), partial_path(folder, name) as stage:
                temp = os.path.join(stage, name)
                _write_file(temp, some, metadata)
                rename_into_place(temp, path)
            return
        shards = assign_shards(some, max_shard_bytes)
        config = marked_config(path) if any(item.meta is not None for item in some) else None
        with make_folders(path), partial_path(path, "model") as stage:
            temps = [os.path.join(stage, str(i)) for i in range(len(shards))]
            for temp, shard in zip(temps, shards, strict=True):
                _write_file(temp, shard, metadata)
            holds = [[stored for item in shard for stored in item.stored] for shard in shards]
            total = sum(item.nbytes for item in some)
            replace_checkpoint(path, stage, temps, holds, total)
            remove_left_over(path)
        if config is not None:
            write_bytes(os.path.join(path, "config.json"), config)
    except CheckpointError as e:
        raise CheckpointError(path, e.tensor, e.reason) from e


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, and weights that some library left as plain tensors, which it does not list."""
    out = model.state_dict()
    return out | {name: slot.tensor for name, slot in slots_of(model).items() if name not in out}


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
