"""What a search has solved and measured: in memory, or in files of a folder, from which a later search continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.disk_offload import offloaded
from ..calibration.journal import SharedJournal

WEIGHTS, LOSSES = "weights", "losses"  # of one parameter under each candidate


class SearchJournal(SharedJournal):
    """A journal that is written with each result."""

    ending, key_file = "search", "search.json"

    def read_file(self, path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True, mmap=True)  # type: ignore[no-any-return]

    def put(self, name: str, solved: Any) -> None:
        super().put(name, solved)
        self.write()


class Measurements:
    """WEIGHTS and LOSSES by the name of a parameter.

    journal  keeps them in files; None: in memory, or within ``offload_to`` in files without names
    """

    def __init__(self, journal: SearchJournal | None) -> None:
        self.journal = journal
        self.done: dict[str, Any] = {} if journal is None else journal.done

    def get(self, what: str, name: str) -> Any:
        return self.done[f"{what} {name}"]

    def names(self, what: str) -> frozenset[str]:
        return frozenset(key.removeprefix(f"{what} ") for key in self.done if key.startswith(f"{what} "))

    def put(self, what: str, name: str, values: list[Any]) -> None:
        key = f"{what} {name}"
        if self.journal is None:
            self.done[key] = [offloaded(v) if isinstance(v, Tensor) else v for v in values]
        else:
            self.journal.put(key, values)

    def flush(self) -> None:
        """After this, :meth:`get` has what was put on any rank. Called by all of them."""
        if self.journal is not None:
            self.journal.flush()
