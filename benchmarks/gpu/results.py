"""results.json: what every stage found, rewritten as the run goes, so that a kill loses one case at most.

{"version": 1, "dry": bool, "commit": str, "digest": {...}, "started": iso time, "budget": seconds, "versions": {...},
 "stages": {stage: {"status": "running" | "done" | "out of time" | "failed" | "skipped", "seconds": float, "note": str,
                    "cases": {case: {...values} or {"error": str, "traceback": str}}}}}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

VERSION = 1
ROOT = Path(__file__).resolve().parents[2]
FILE, CURRENT = "results.json", "current.json"
_CHEAP, _SHARE = 0.01, 20  # a file that takes longer than 10 ms to write gets 1/20 of the time


class Results:
    """The results of a folder. One process writes them at a time: the worker while it lives, else the parent."""

    def __init__(self, folder: Path, data: dict[str, Any]) -> None:
        self.folder, self.data = folder, data
        self._saved, self._cost = 0.0, 0.0

    @classmethod
    def open(cls, folder: Path) -> Results:
        return cls(folder, read(folder))

    def stage(self, name: str) -> dict[str, Any]:
        empty = {"status": "running", "seconds": 0.0, "note": "", "cases": {}}
        return self.data["stages"].setdefault(name, empty)

    def cases(self, stage: str) -> dict[str, Any]:
        """Case -> values, of a stage that may not have run."""
        return self.data["stages"].get(stage, {}).get("cases", {})

    def value(self, stage: str, case: str, key: str, default: Any = None) -> Any:
        return self.cases(stage).get(case, {}).get(key, default)

    def record(self, stage: str, case: str, values: dict[str, Any]) -> None:
        self.stage(stage)["cases"][case] = values
        if self._cost < _CHEAP or time.monotonic() - self._saved >= _SHARE * self._cost:
            self.save()

    def save(self) -> None:
        start = time.monotonic()
        write_json(self.folder / FILE, self.data)
        self._saved = time.monotonic()
        self._cost = self._saved - start

    def begin(self, stage: str, case: str, limit: float) -> None:
        """Note which case runs, so that the parent knows whose fault a crash or a hang is."""
        write_json(self.folder / CURRENT, {"stage": stage, "case": case, "since": time.time(), "limit": limit})


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text("utf-8"))


def read_current(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / CURRENT).read_text("utf-8"))
    except (OSError, ValueError):  # no case has begun
        return None


def write_json(path: Path, data: Any, indent: int | None = None) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(plain(data), indent=indent, allow_nan=False) + "\n", "utf-8")
    os.replace(part, path)


def plain(data: Any) -> Any:
    """The data with "inf", "-inf" and "nan" for numbers that JSON does not have."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


def environment() -> dict[str, str]:
    """Of child processes: this tree comes first."""
    others = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{others}" if others else str(ROOT)}


# -- which sources ran -------------------------------------------------------------------------------------------------

KERNELS = "pennyweight/kernels/triton"


def digest(folder: str = "pennyweight", root: Path = ROOT) -> str:
    """sha256 of the Python sources below a folder; tiles.json is data and not part of it."""
    found = hashlib.sha256()
    for path in sorted((root / folder).rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def commit_of(root: Path = ROOT) -> str:
    """The commit that is checked out, read from .git without git; "" if there is none."""
    git = root / ".git"
    try:
        if git.is_file():  # a worktree: "gitdir: PATH"
            git = Path(git.read_text("utf-8").removeprefix("gitdir:").strip())
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = git / (git / "commondir").read_text("utf-8").strip() if (git / "commondir").exists() else git
        if (common / name).exists():
            return (common / name).read_text("utf-8").strip()
        packed = (common / "packed-refs").read_text("utf-8").splitlines()
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    except (OSError, IndexError):  # the tree travels without .git
        return ""
