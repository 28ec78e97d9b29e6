"""Progress of a long job on disk, so that an interrupted one can resume, and a check that it is the same job."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import __version__
from .atomic_write import write_bytes
from .errors import CheckpointError
from .safetensors_file import header_bytes, place
from .state_dict import Item
from .strict_json import parse

NAME = "quantize.progress.json"
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

    def __init__(self, folder: str, job: str, name: str = NAME) -> None:
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
