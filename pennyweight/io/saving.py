"""pw.save: writes a model or state dict to safetensors atomically, in shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..core.model_arguments import check_arguments, check_storable
from ..planning.quantize_report import ALGORITHM
from ..support.progress import Progress, step
from .atomic_write import (
    make_folders,
    partial_path,
    remove_left_over,
    rename_into_place,
    says_what_was_needed,
    write_bytes,
)
from .config_files import marked_config
from .file import CheckpointError
from .replace_checkpoint import replace_checkpoint
from .safetensors_file import Writer, place
from .state_dict import Item, items, metadata_of, slots_of

_LOG = logging.getLogger(__name__)
MAX_SHARD_BYTES = 4 * 1000**3  # 4 GB: below the limits of FAT and most upload tools


@check_arguments(model=check_storable)
def save(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = None,
) -> None:
    """Write a model or a state dict in the format of docs/format.md.

    path             a folder, or one file if it ends in .safetensors; folders are created if missing
    max_shard_bytes  maximum size of each file in a folder; several files get an index
    metadata         your own strings, stored in each file
    progress         a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    The write is atomic: readers see either the old or the new checkpoint, also after a crash. Files are written to a
    staging folder and, when all are complete, renamed to names that no older checkpoint has, the index last; then files
    of an older checkpoint in the folder are removed. An error keeps the old checkpoint. Of several concurrent writers
    the last to finish wins. Raises CheckpointError naming a tensor that cannot be stored, and OSError if a write fails.
    A transformers config.json in the folder gets a "quantization_config", so that quantized weights are not taken for
    missing ones.

    >>> import tempfile, torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    >>> report = pw.quantize_(model, "int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pw.save(model, folder)
    ...     again = pw.load(folder, torch.nn.Sequential(torch.nn.Linear(64, 8)))
    >>> torch.equal(again[0].weight.dequantize(), model[0].weight.dequantize())
    True
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module and adds a prefix to names
    state_dict = _state_dict(model) if isinstance(model, nn.Module) else model
    metadata = {**algorithm_of(model), **(metadata or {})}
    path = os.path.abspath(os.fspath(path))
    if os.path.isfile(path) and not path.endswith(".safetensors"):
        raise CheckpointError(path, None, "is a file; pass a folder, or a name that ends in .safetensors")
    try:
        some = items(state_dict)
        total = sum(item.nbytes for item in some)
        room = says_what_was_needed(path, total)
        if path.endswith(".safetensors"):
            folder, name = os.path.split(path)
            with room, _counting(some, progress) as wrote, make_folders(folder), partial_path(folder, name) as stage:
                temp = os.path.join(stage, name)
                write_shard(temp, some, metadata_of(some, metadata), wrote)
                rename_into_place(temp, path)
            return
        shards = assign_shards(some, max_shard_bytes)
        config = marked_config(path) if any(item.meta is not None for item in some) else None
        with room, _counting(some, progress) as wrote, make_folders(path), partial_path(path, "model") as stage:
            temps = [os.path.join(stage, str(i)) for i in range(len(shards))]
            for temp, shard in zip(temps, shards, strict=True):
                write_shard(temp, shard, metadata_of(shard, metadata), wrote)
            holds = [[stored for item in shard for stored in item.stored] for shard in shards]
            replace_checkpoint(path, stage, temps, holds, total)
            remove_left_over(path)
        if config is not None:
            write_bytes(os.path.join(path, "config.json"), config)
    except CheckpointError as e:
        raise CheckpointError(path, e.tensor, e.reason) from e


@contextmanager
def _counting(some: Sequence[Item], progress: Progress) -> Iterator[Callable[[Item], None]]:
    """A function to call after each written item, which shows it."""
    done = 0

    def wrote(item: Item) -> None:
        nonlocal done
        done += 1
        advance(done, len(some), item.name)

    with step("save", progress) as advance:
        yield wrote
    _LOG.info("save: %d tensors, %d bytes", len(some), sum(item.nbytes for item in some))


def algorithm_of(model: Any) -> dict[str, str]:
    """Metadata that names the algorithm that chose the codes of a model, if ``quantize_`` recorded one. ``convert``
    does not round such codes again without being told to."""
    algorithm = getattr(model, ALGORITHM, None)
    return {ALGORITHM: algorithm} if isinstance(algorithm, str) else {}


def _state_dict(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, plus weights that a library keeps as plain tensors, which it does not list."""
    out = model.state_dict()
    return out | {name: slot.tensor for name, slot in slots_of(model).items() if name not in out}


def assign_shards(some: Sequence[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Distribute items over shards, in order; a tensor larger than a shard gets its own, and is never split."""
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    shards: list[list[Item]] = [[]]
    room = max_shard_bytes
    for item in some:
        if item.nbytes > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room -= item.nbytes
    return shards


def write_shard(
    path: str, shard: Sequence[Item], metadata: Mapping[str, str], wrote: Callable[[Item], object] = lambda item: None
) -> None:
    """Write one new safetensors file. wrote: called after each item."""
    writer = Writer(path, place({name: kind for item in shard for name, kind in item.stored.items()}), metadata)
    try:
        for item in shard:
            for name, start, tensor in item.make():
                writer.put(name, tensor, start)
            wrote(item)
        writer.finish()
    finally:
        writer.close()
