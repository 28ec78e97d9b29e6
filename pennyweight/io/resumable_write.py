"""Writes a checkpoint shard by shard as a job that can be interrupted and resumed, and shared by the ranks of
torch.distributed."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..distributed.rank_group import RankGroup
from ..support.progress import Callback
from ..support.version import __version__
from .atomic_write import (
    check_room,
    folder_lock,
    make_folders,
    remove_left_over,
    rename_into_place,
    sync_folder,
    write_bytes,
)
from .checkpoint import INDEX, SINGLE, index_bytes
from .file import CheckpointError
from .replace_checkpoint import PROGRESS, is_ours, shard_names
from .safetensors_file import header_bytes, place
from .saving import write_shard
from .state_dict import Item, metadata_of
from .streaming import QuantizationNoise
from .strict_json import parse

_MAX_BYTES = 64 << 20
_HEAD_BYTES = 1 << 20  # bytes read from each source file: its header or most of it


def fingerprint(
    files: Iterable[str],
    labels: Iterable[str],
    shards: Iterable[list[Item]],
    metadata: Callable[[list[Item]], dict[str, str]],
) -> str:
    """Fingerprint, equal for jobs that write the same bytes: release, source files (names, sizes, times, first bytes),
    labels, headers of the result."""
    digest = hashlib.sha256()

    def add(*what: Any) -> None:
        digest.update(json.dumps(what).encode())

    for path in files:
        with open(path, "rb") as file:
            info, head = os.fstat(file.fileno()), file.read(_HEAD_BYTES)
        add(os.path.basename(path), info.st_size, info.st_mtime_ns, hashlib.sha256(head).hexdigest())
    add(__version__, list(labels))
    for shard in shards:
        entries = place({name: kind for item in shard for name, kind in item.stored.items()})
        digest.update(header_bytes(entries, metadata(shard)))
    return digest.hexdigest()


class Progress:
    """The progress file of a folder: completed shards, and the SQNR of their tensors."""

    def __init__(self, folder: str, job: str, name: str = PROGRESS) -> None:
        self.path, self.job = os.path.join(folder, name), job
        self.done: dict[str, dict[str, float]] = {}

    def read(self) -> bool:
        """Load the progress file; False if there is none.

        Raises CheckpointError if it belongs to another job: the outputs of two jobs would be mixed.
        """
        if not os.path.lexists(self.path):
            return False
        try:
            with open(self.path, "rb") as f:
                data = parse(f.read(_MAX_BYTES + 1), max_bytes=_MAX_BYTES, max_depth=8, floats=True)
            if data["version"] != 1:
                raise ValueError(f"version {data['version']!r}")
            job, done = data["job"], data["done"]
            self.done = {name: {n: float(v) for n, v in rows.items()} for name, rows in done.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(self.path, None, f"cannot be read ({e}); {_REMEDY}") from e
        if job != self.job:
            raise CheckpointError(self.path, None, f"has another source, config, release or shard size; {_REMEDY}")
        return True

    def write(self) -> None:
        rows = {name: {n: v if math.isfinite(v) else "inf" for n, v in s.items()} for name, s in self.done.items()}
        data = {"version": 1, "job": self.job, "done": rows}
        write_bytes(self.path, json.dumps(data, indent=1, sort_keys=True).encode())

    def add(self, shard: str, sqnr: Mapping[str, float]) -> None:
        """Record that a shard is complete."""
        self.done[shard] = dict(sqnr)
        self.write()


_REMEDY = "pass resume=False to start over, or choose another folder"


_LOG = logging.getLogger(__name__)


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


def carry_out(job: Job, dst: str, resume: bool, advance: Callback | None, ranks: bool = False) -> dict[str, float]:
    """Run the job; returns the SQNR of quantized tensors by name. Raises OSError if a write fails; completed shards
    then stay for ``resume``.

    ranks: every rank of torch.distributed runs this job, and each writes its share of the files; rank 0 keeps the
    progress file, and writes the index when all files are complete.
    """
    names = shard_names(len(job.shards))
    shards = dict(zip(names, job.shards, strict=True))
    team = RankGroup(dst, ranks)
    advance = advance if team.rank == 0 else None
    mark = fingerprint(job.files, job.labels, job.shards, job.metadata)
    team.same("the planned output", mark)
    progress = Progress(dst, mark)
    with ExitStack() as stack:  # on rank 0: holds the lock against other jobs
        progress.done = team.first(lambda: _begin(job, dst, resume, progress, stack))
        count = 0
        left = [name for name in names if name not in progress.done]
        for name in progress.done:
            count += sum(i.meta is not None for i in shards[name])
            if advance is not None:
                advance(count, job.total, name)
        for start in range(0, len(left), team.size):
            turn = left[start : start + team.size]
            own = turn[team.rank] if team.rank < len(turn) else None
            done = team.step(partial(_write_one, job, dst, own, shards, count, advance))
            for name, sqnr in zip(turn, done, strict=False):
                progress.done[name] = sqnr
                count += sum(i.meta is not None for i in shards[name])
            if len(names) > 1:  # a single file needs no index
                team.first(progress.write)
        team.first(lambda: _end(job, dst, shards, progress))
    return {n: v for name in names for n, v in progress.done[name].items()}


def _write_one(
    job: Job, dst: str, name: str | None, shards: dict[str, list[Item]], count: int, advance: Callback | None
) -> dict[str, float]:
    """Write one output file; returns the SQNR of its tensors. name: None if this rank has none to write."""
    if name is None:
        return {}

    def wrote(item: Item) -> None:
        nonlocal count
        count += item.meta is not None
        if advance is not None and item.meta is not None:
            advance(count, job.total, item.name)

    path = os.path.join(dst, name)
    temp = f"{path}.partial"
    try:
        write_shard(temp, shards[name], job.metadata(shards[name]), wrote)
        rename_into_place(temp, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temp)
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
    if progress.done:
        _LOG.info("resume: %d of %d files of %s were complete", len(progress.done), len(names), dst)
    return progress.done
