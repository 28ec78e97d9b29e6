"""Writes a checkpoint shard by shard as a job that can be interrupted, resumed, and distinguished from others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from .atomic_write import (
    Writer,
    index_bytes,
    make_folders,
    remove_left_over,
    rename_into_place,
    sync_folder,
    write_bytes,
)
from .checkpoint import INDEX, SINGLE
from .errors import CheckpointError
from .job_progress import Progress, fingerprint
from .locks import folder_lock
from .rank_barrier import RankGroup
from .safetensors_file import place
from .shard_plan import is_ours, shard_names
from .state_dict import Item, metadata_of
from .streaming import QuantizationNoise

Told = Callable[[int, int, str], None]


@dataclass
class Job:
    """Everything decided before writing.

    files     source files, which must not change
    labels    all other inputs that determine the output
    shards    contents of each output file
    metadata  ``__metadata__`` of a file with these items
    side      writes the small files into the folder
    total     number of tensors for the progress display: items with a ``meta``
    """

    files: tuple[str, ...]
    labels: list[str]
    shards: list[list[Item]]
    side: Callable[[str], object]
    metadata: Callable[[list[Item]], dict[str, str]] = metadata_of
    noise: QuantizationNoise = field(default_factory=lambda: QuantizationNoise({}, {}))

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for shard in self.shards for item in shard)

    @property
    def total(self) -> int:
        return sum(item.meta is not None for shard in self.shards for item in shard)


def check_places(files: Iterable[str], source: str, dst: str) -> None:
    """Raise CheckpointError if writing to the folder dst would modify the source."""
    real = os.path.realpath(dst)
    if any(os.path.dirname(os.path.realpath(file)) == real for file in files) or real == os.path.realpath(source):
        raise CheckpointError(dst, None, "is the folder of the source; choose another folder")
    if os.path.lexists(dst) and not os.path.isdir(dst):
        raise CheckpointError(dst, None, "is not a folder")


def carry_out(job: Job, dst: str, resume: bool, told: Told | None, ranks: bool = False) -> dict[str, float]:
    """Run the job; returns the SQNR of quantized tensors by name. Raises OSError if a write fails; completed shards
    then stay for ``resume``.

    ranks: every rank of torch.distributed runs this job, and each writes its share of the files; rank 0 keeps the
    progress file, and writes the index when all files are complete.
    """
    names = shard_names(len(job.shards))
    shards = dict(zip(names, job.shards, strict=True))
    team = RankGroup(dst, ranks)
    told = told if team.rank == 0 else None
    mark = fingerprint(job.files, job.labels, job.shards, job.metadata)
    team.same("the planned output", mark)
    progress = Progress(dst, mark)
    with ExitStack() as stack:  # on rank 0: holds the lock against other jobs
        progress.done = team.first(lambda: _begin(job, dst, resume, progress, stack))
        count = 0
        left = [name for name in names if name not in progress.done]
        for name in progress.done:
            count += sum(i.meta is not None for i in shards[name])
            if told is not None:
                told(count, job.total, name)
        for start in range(0, len(left), team.size):
            turn = left[start : start + team.size]
            mine = turn[team.rank] if team.rank < len(turn) else None
            done = team.step(partial(_write_one, job, dst, mine, shards, count, told))
            for name, sqnr in zip(turn, done, strict=False):
                progress.done[name] = sqnr
                count += sum(i.meta is not None for i in shards[name])
            if len(names) > 1:  # a single file needs no index
                team.first(progress.write)
        team.first(lambda: _end(job, dst, shards, progress))
    return {n: v for name in names for n, v in progress.done[name].items()}


def _write_one(
    job: Job, dst: str, name: str | None, shards: dict[str, list[Item]], count: int, told: Told | None
) -> dict[str, float]:
    """Write one output file; returns the SQNR of its tensors."""
    if name is None:
        return {}
    _write_shard(job, os.path.join(dst, name), shards[name], count, told)
    return {i.name: job.noise.sqnr(i.name) for i in shards[name] if i.name in job.noise.signal}


def _end(job: Job, dst: str, shards: dict[str, list[Item]], progress: Progress) -> None:
    if len(shards) > 1:
        weight_map = {s: n for n, shard in shards.items() for i in shard for s in i.stored}
        write_bytes(os.path.join(dst, INDEX), index_bytes(weight_map, job.nbytes))
    os.unlink(progress.path)
    sync_folder(dst)


def _begin(job: Job, dst: str, resume: bool, progress: Progress, stack: ExitStack) -> dict[str, dict[str, float]]:
    """The shards of this job already complete in dst. Locks the folder, writes the progress file, checks the free
    space, writes the small files and removes everything that is not part of this job."""
    stack.enter_context(make_folders(dst))
    stack.enter_context(folder_lock(dst, patience=0))
    found = resume and progress.read()
    there = [n for n in os.listdir(dst) if is_ours(n)]
    whole = [n for n in there if n in (INDEX, SINGLE)]
    if not found and there and (whole or not os.path.lexists(progress.path)):
        name = min(whole or there)
        raise CheckpointError(dst, None, f"already contains a checkpoint ({name}); remove it or choose another folder")
    if not found:
        for name in there:
            os.unlink(os.path.join(dst, name))
    progress.done = {n: rows for n, rows in progress.done.items() if os.path.isfile(os.path.join(dst, n))}
    names = shard_names(len(job.shards))
    if INDEX in there and set(names) - progress.done.keys():  # this job writes the index last
        raise CheckpointError(dst, None, f"already contains a checkpoint ({INDEX}); remove it or choose another folder")
    for name in os.listdir(dst):
        if name.endswith(".partial") and is_ours(name.removesuffix(".partial")):
            os.unlink(os.path.join(dst, name))
    remove_left_over(dst)
    progress.write()
    need = sum(i.nbytes for n, shard in zip(names, job.shards, strict=True) if n not in progress.done for i in shard)
    try:
        check_room(dst, need)
    except OSError:
        if not progress.done:
            os.unlink(progress.path)
        raise
    job.side(dst)
    return progress.done


def check_room(folder: str, need: int) -> None:
    """Raise OSError if the disk has less than this many free bytes."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(28, f"{folder}: {need} bytes are required, {free} are free")


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
        rename_into_place(temp, path)
    finally:
        writer.close()
        with suppress(FileNotFoundError):
            os.unlink(temp)
