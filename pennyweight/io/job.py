"""A job that writes a checkpoint, shard by shard: it can be stopped, go on, and be told from another job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from .checkpoint import INDEX
from .container import place
from .errors import CheckpointError
from .native import Item, metadata_of
from .progress import Progress, fingerprint
from .shards import is_ours, shard_names
from .streaming import Noise
from .write import Writer, index_bytes, publish, write_bytes

Told = Callable[[int, int, str], None]


@dataclass
class Job:
    """What is decided before a byte is written.

    files     those of the source, which must stay as they are
    labels    whatever else decides what is written
    shards    what each file of the result holds
    metadata  of a file that holds these
    side      writes the small files into the folder
    total     tensors that the progress counts: items with a ``meta``
    """

    files: tuple[str, ...]
    labels: list[str]
    shards: list[list[Item]]
    side: Callable[[str], object]
    metadata: Callable[[list[Item]], dict[str, str]] = metadata_of
    noise: Noise = field(default_factory=lambda: Noise({}, {}))

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for shard in self.shards for item in shard)

    @property
    def total(self) -> int:
        return sum(item.meta is not None for shard in self.shards for item in shard)


def check_places(files: Iterable[str], source: str, dst: str) -> None:
    """Raise CheckpointError where writing to the folder dst would touch the source."""
    real = os.path.realpath(dst)
    if any(os.path.dirname(os.path.realpath(file)) == real for file in files) or real == os.path.realpath(source):
        raise CheckpointError(dst, None, "is where the source lies; choose another folder")
    if os.path.lexists(dst) and not os.path.isdir(dst):
        raise CheckpointError(dst, None, "is no folder")


def carry_out(job: Job, dst: str, resume: bool, told: Told | None) -> dict[str, float]:
    """Write it all; SQNR by name of what was quantized. Raises OSError where the disk refuses; what is finished by
    then stays for ``resume``."""
    names = shard_names(len(job.shards))
    os.makedirs(dst, exist_ok=True)
    progress = _begin(job, dst, resume)
    job.side(dst)
    count = 0
    for name, shard in zip(names, job.shards, strict=True):
        fresh = name not in progress.done
        if fresh:
            _write_shard(job, os.path.join(dst, name), shard, count, told)
            progress.add(name, {i.name: job.noise.sqnr(i.name) for i in shard if i.name in job.noise.signal})
        count += sum(i.meta is not None for i in shard)
        if not fresh and told is not None:
            told(count, job.total, name)
    if len(names) > 1:
        weight_map = {s: n for n, shard in zip(names, job.shards, strict=True) for i in shard for s in i.stored}
        write_bytes(os.path.join(dst, INDEX), index_bytes(weight_map, job.nbytes))
    os.unlink(progress.path)
    return {n: v for sqnr in progress.done.values() for n, v in sqnr.items()}


def _begin(job: Job, dst: str, resume: bool) -> Progress:
    """The progress of this job in dst, on disk; room for the rest, and nothing there that is not of this job."""
    progress = Progress(dst, fingerprint(job.files, job.labels, job.shards, job.metadata))
    found = resume and progress.read()
    there = [n for n in os.listdir(dst) if is_ours(n)]
    if not found and not os.path.lexists(progress.path) and there:
        raise CheckpointError(dst, None, f"holds a checkpoint ({min(there)}); remove it or choose another folder")
    if not found:
        for name in there:
            os.unlink(os.path.join(dst, name))
    progress.done = {n: rows for n, rows in progress.done.items() if os.path.isfile(os.path.join(dst, n))}
    for name in os.listdir(dst):
        if name.endswith(".partial") and is_ours(name.removesuffix(".partial")):
            os.unlink(os.path.join(dst, name))
    progress.write()
    names = shard_names(len(job.shards))
    need = sum(i.nbytes for n, shard in zip(names, job.shards, strict=True) if n not in progress.done for i in shard)
    try:
        check_room(dst, need)
    except OSError:
        if not progress.done:
            os.unlink(progress.path)
        raise
    return progress


def check_room(folder: str, need: int) -> None:
    """Raise OSError where the disk has no room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(28, f"{folder}: {need} bytes are needed, {free} are free")


def _write_shard(job: Job, path: str, shard: list[Item], count: int, told: Told | None) -> None:
    temp = f"{path}.partial"
    writer = Writer(temp, place({n: kind for i in shard for n, kind in i.stored.items()}), job.metadata(shard))
    try:
        for item in shard:
            for name, start, tensor in item.make():
                writer.put(name, tensor, start)
            count += item.meta is not None
            if told is not None and item.meta is not None:
                told(count, job.total, item.name)
        writer.finish()
        publish(temp, path)
    finally:
        writer.close()
        with suppress(FileNotFoundError):
            os.unlink(temp)
