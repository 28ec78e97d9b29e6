"""Saves finished weights of a calibration in a folder, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...core.tensor import AffineQuantizedTensor
from ...distributed.rank_group import RankGroup
from ...planning.config_resolution import PlanError
from ...planning.plan import Plan
from .activation_cache import SHARED_STATES, STATES
from .disk_offload import MAPPED

_LOG = logging.getLogger(__name__)
KEY = "calibration.json"
PREFIX, DIGITS = "solved-", 5  # of a file of finished weights, and of its number
PART = ".part"  # the ending of one that is being written
TEMPORARY = (STATES, SHARED_STATES, MAPPED)


class Journal:
    """Finished weights by name. A folder belongs to one model, plan, recipe and data set; others raise PlanError.

    Files are written under a temporary name and renamed, so that an interruption leaves no partial file. A subclass may
    keep them in another format.
    """

    ending, key_file = "pt", KEY

    def __init__(self, folder: str | Path, model: nn.Module, todo: Plan, recipe: Any, batches: Sequence[Any]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        key = {
            "version": 1,
            "model": _digest([*model.named_parameters(), *model.named_buffers()]),
            "plan": [[row.name, str(row.scheme), row.layout] for row in todo.active],
            "recipe": str(recipe),
            "data": _digest([(str(i), t) for i, t in enumerate(tree_leaves(list(batches)))]),
        }
        self.claim(key)
        self.done: dict[str, Any] = {}
        self.fresh: dict[str, Any] = {}
        files = self.found()
        for file in files:
            self.done |= self.read_file(self.folder / file)
        if self.done:
            _LOG.info("resume: %d weights were solved before, in %s", len(self.done), self.folder)
        self.files = 1 + max((int(file[len(PREFIX) : len(PREFIX) + DIGITS]) for file in files), default=-1)

    def claim(self, key: dict[str, Any]) -> None:
        """Write the key of a new folder, or compare it with that of an interrupted run."""
        path = self.folder / self.key_file
        if not path.exists():
            _write(path, lambda to: to.write_text(json.dumps(key), encoding="utf-8"))
            return
        was = json.loads(path.read_text(encoding="utf-8"))
        differs = [name for name in key if was.get(name) != key[name]]
        if differs:
            raise PlanError(
                f"{path} is of another run: {', '.join(differs)} differ; use another folder or delete this one"
            )

    def found(self) -> list[str]:
        """Names of the files of finished weights."""
        return sorted(file.name for file in self.folder.glob(f"{PREFIX}*.{self.ending}"))

    def read_file(self, path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True)  # type: ignore[no-any-return]

    def write_file(self, path: Path, solved: dict[str, Any]) -> None:
        torch.save(solved, path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.done)

    def get(self, name: str) -> Any | None:
        return self.done.get(name)

    def put(self, name: str, solved: Any) -> None:
        self.fresh[name] = solved

    def flush(self) -> None:
        """Write the weights added since the last flush."""
        self.write_fresh()
        self.files += 1

    def write_fresh(self, mark: str = "") -> str:
        """Write a file of the weights added since the last one; returns its name, "" if there are none."""
        if not self.fresh:
            return ""
        name = f"{PREFIX}{self.files:0{DIGITS}d}{mark}.{self.ending}"
        _write(self.folder / name, lambda to: self.write_file(to, self.fresh))
        self.fresh = {}
        return name


class SharedJournal(Journal):
    """A journal of results that are mapped from their files, written by one process or by several ranks that see the
    folder. Every rank makes it and calls :meth:`flush` in the same order; an error of one is raised on all."""

    def __init__(self, *of: Any, team: RankGroup | None = None) -> None:
        self.team, self.written = team or RankGroup(), []  # type: ignore[var-annotated]
        super().__init__(*of)

    def claim(self, key: dict[str, Any]) -> None:
        self.team.first(lambda: super(SharedJournal, self).claim(key))
        self.team.step(lambda: super(SharedJournal, self).claim(key))

    def found(self) -> list[str]:
        return self.team.first(lambda: super(SharedJournal, self).found())  # type: ignore[no-any-return]

    def write(self) -> None:
        """Write a file of what was added since the last one; other ranks get it with :meth:`flush`."""
        name = self.write_fresh(f"-{self.team.rank}" if self.team.size > 1 else "")
        if name:
            self.written.append(name)
            self.files += 1

    def flush(self) -> None:
        """Write what was added since the last file, and map what all ranks have written since the last flush."""

        def write() -> list[str]:
            self.write()
            names, self.written = self.written, []
            return names

        for names in self.team.step(write):
            for name in names:
                self.done |= self.read_file(self.folder / name)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run has left in its folder and cannot use: hidden states and unfinished files."""
    for entry in folder.iterdir():
        if entry.name.startswith(TEMPORARY) or (entry.name.startswith(PREFIX) and entry.suffix == PART):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _write(path: Path, write: Any) -> None:
    part = path.with_name(f"{path.name}{PART}")
    write(part)
    with part.open("rb+") as f:
        os.fsync(f.fileno())
    part.replace(path)


def _digest(tensors: Sequence[tuple[str, Any]]) -> str:
    """SHA-256 of names, dtypes, shapes and values; of the repr of non-tensors."""
    found = hashlib.sha256()
    for name, value in tensors:
        if not isinstance(value, Tensor):
            found.update(f"{name} {value!r}".encode())
            continue
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if isinstance(value, AffineQuantizedTensor):
            value = value.dequantize()
        found.update(value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.numel() else b"")
    return found.hexdigest()
