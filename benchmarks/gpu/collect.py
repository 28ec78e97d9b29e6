"""``scripts/gpu --collect FOLDER``: checks a results folder, and checks it in.

Writes benchmarks/results/gpu/<card>-<date>.json; the tuned lines into pennyweight/kernels/triton/tiles.json, if the
kernels that they are for were conformant and are still the same; and the tables of docs/gpu.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import FILE, KERNELS, ROOT, VERSION, digest, read, write_json

RESULTS = "benchmarks/results/gpu"
TILES = f"{KERNELS}/tiles.json"
PAGE = "docs/gpu.md"
FAMILY = "weight_only"  # the kernels that have tiles
KEY = ("target", "device", "family", "m")  # what a line of tiles.json is chosen by: a card, or the target of others


class Refused(ValueError):
    """The folder is no result of a device."""


@dataclass(frozen=True)
class Collected:
    """path: the new file; tiles: lines written; refused: why no lines were, or ""."""

    path: Path
    tiles: int
    refused: str


def collect(folder: Path, root: Path = ROOT) -> int:
    """Check in a folder and print what was written. Returns an exit code."""
    try:
        found = check_in(folder, root)
    except Refused as error:
        print(f"scripts/gpu: {folder}: {error}")
        return 2
    print(f"wrote {found.path.relative_to(root)}")
    print(f"wrote {found.tiles} lines of {TILES}" if not found.refused else f"{TILES} is unchanged: {found.refused}")
    print(f"wrote the tables of {PAGE}")
    return 0


def check_in(folder: Path, root: Path = ROOT, allow_dry: bool = False) -> Collected:
    """Validate and write. ``allow_dry`` is for tests. Raises Refused."""
    data = checked(folder, allow_dry)
    path = _free_name(root / RESULTS, data)
    name = path.relative_to(root).as_posix()
    refused = why_no_tiles(data, root)
    held = tiles_held(root / TILES)
    lines = [] if refused else tuned_lines(data, name, {line["target"] for line in held if "target" in line})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data, indent=1)
    if lines:
        write_tiles(root / TILES, [*held, *lines])
    from .page import write_page

    write_page(root)
    return Collected(path, len(lines), refused)


def checked(folder: Path, allow_dry: bool = False) -> dict[str, Any]:
    """The results of a folder. Raises Refused with the reason if they are incomplete, or of no device."""
    try:
        data = read(folder)
    except (OSError, ValueError) as error:
        raise Refused(f"{FILE} cannot be read: {error}") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise Refused(f"{FILE} is not of version {VERSION}")
    missing = [key for key in ("dry", "commit", "digest", "started", "stages") if key not in data]
    if missing:
        raise Refused(f"{FILE} has no {', '.join(missing)}")
    if data["dry"] and not allow_dry:
        raise Refused("a dry run: its times are invented")
    if not data["commit"]:
        raise Refused("the commit is not known; run with --commit, or write it into results.json")
    machine = data["stages"].get("facts", {}).get("cases", {}).get("machine", {})
    missing = [key for key in ("card", "driver", "torch", "triton", "target") if not machine.get(key)]
    if missing:
        raise Refused(f"stage facts did not find {', '.join(missing)}")
    for name, stage in data["stages"].items():
        for case, values in stage.get("cases", {}).items():
            spread = values.get("spread")
            if values.get("us") is not None and not isinstance(spread, (int, float)):
                raise Refused(f"{name}: {case!r} has a time without a spread")
    return data


def _free_name(folder: Path, data: dict[str, Any]) -> Path:
    """<card>-<date>.json, or with -2, -3 ... behind it."""
    card = str(data["stages"]["facts"]["cases"]["machine"]["card"])
    words = re.findall(r"[a-z0-9]+", card.lower().replace("nvidia", ""))
    stem = f"{'-'.join(words) or 'card'}-{data['started'][:10]}"
    for number in range(1, 100):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        if not path.exists():
            return path
    raise Refused(f"{folder} has 99 files of {stem}")


# -- tiles -------------------------------------------------------------------------------------------------------------


def why_no_tiles(data: dict[str, Any], root: Path = ROOT) -> str:
    """Why the tuned lines must not be shipped, or ""."""
    stages = data["stages"]
    conformance = stages.get("conformance")
    if not stages.get("tune", {}).get("cases"):
        return "nothing was tuned"
    if conformance is None or not conformance["cases"]:
        return "conformance did not run"
    families = _families()
    failed = [
        name
        for name, values in conformance["cases"].items()
        if "error" in values and families.get(name, FAMILY) == FAMILY
    ]
    if failed:
        return f"conformance failed: {', '.join(failed[:3])}{' ...' if len(failed) > 3 else ''}"
    if conformance["status"] not in ("done", "failed"):
        return f"conformance is {conformance['status']}"
    if data["digest"].get("kernels") != digest(KERNELS, root):
        return f"the sources of {KERNELS} have changed since the run"
    return ""


def _families() -> dict[str, str]:
    """Case -> the family of kernels that it tests. Cases of whole layers are not among them, and count for all."""
    from pennyweight.kernels.triton import self_test

    return {f"kernels: {case.name}": case.family for case in self_test.cases(full=True)}


def tiles_held(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8"))["lines"] if path.exists() else []


def tuned_lines(data: dict[str, Any], source: str, known: Collection[str]) -> list[dict[str, Any]]:
    """The lines of this run, of the cases that timed every candidate: for its card, and for other cards of its target
    if none was measured before. known: targets with lines."""
    card = data["stages"]["facts"]["cases"]["machine"]["card"]
    lines = []
    for values in data["stages"]["tune"]["cases"].values():
        if "tile" in values and values.get("complete"):
            line = {"family": values["family"], "m": values["m"], "tile": values["tile"], "source": source}
            lines.append({"device": card, **line})
            lines += [{"target": values["target"], **line}] if values["target"] not in known else []
    return lines


def write_tiles(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write lines; the last one of each key counts."""
    from pennyweight.kernels.triton.tiles import write

    by_key = {tuple(line.get(k, "") for k in KEY): line for line in lines}
    write(path, [by_key[key] for key in sorted(by_key)])


def all_results(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Name of the file -> its data, oldest first."""
    found = {
        path.relative_to(root).as_posix(): json.loads(path.read_text("utf-8"))
        for path in (root / RESULTS).glob("*.json")
    }
    return dict(sorted(found.items(), key=lambda pair: pair[1]["started"]))
