"""Rows as measured, in one JSON file that is written anew after each, so that a run can be resumed and extended.

`KEPT` is the one that docs/accuracy.md and docs/accuracy-nets.md are written from: a row a line, numbers of seven
digits.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
KEY = ("subject", "digest", "family", "name")
KEPT = Path(__file__).with_name("measured.json")


class Results:
    """Rows by (subject, its digest, family, name), in the order in which they were measured; and the effective rank of
    the language model's inputs, for the gates.

    Raises ValueError for a file of another kind.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: dict[tuple[str, ...], Row] = {}
        self.rank: float | None = None
        self.machine = ""  # on which the rows to come are measured
        if path is not None and path.exists():
            data = json.loads(path.read_text())
            if data.get("kind") != "accuracy":
                raise ValueError(f"{path.name} is not a file of this benchmark; choose another name for --json")
            self.rows = {key_of(row): row for row in data["rows"]}
            self.rank = data.get("rank")

    def add(self, row: Row) -> None:
        """Instead of the row of the same key, if there is one."""
        row = _short(row | {"machine": self.machine})
        self.rows.pop(key_of(row), None)
        self.rows[key_of(row)] = row
        self.write()

    def take(self, other: Results) -> None:
        """The rows of another run; where both have one, a measured one is kept, and this one's before the other's."""
        for key, row in other.rows.items():
            if "figures" not in self.rows.get(key, {}):
                self.rows[key] = row
        self.rank = other.rank if self.rank is None else self.rank
        self.write()

    def only(self, subjects: list[str]) -> Results:
        """The rows of some subjects; not in a file."""
        some = Results()
        some.rows = {key: row for key, row in self.rows.items() if row["subject"] in subjects}
        some.rank = self.rank
        return some

    def write(self) -> None:
        if self.path is None:
            return
        head = json.dumps({"kind": "accuracy", "rank": self.rank})
        rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in self.rows.values())
        text = f'{head[:-1]}, "rows": [\n{rows}\n]}}\n'
        scratch = self.path.with_name(f"{self.path.name}.new")
        scratch.write_text(text)
        os.replace(scratch, self.path)

    def has(self, row: Row) -> bool:
        """Whether it was measured; one that failed is tried again."""
        return "figures" in self.rows.get(key_of(row), {})

    def subjects(self) -> list[str]:
        return list(dict.fromkeys(row["subject"] for row in self.rows.values()))

    def of(self, subject: str) -> list[Row]:
        """The rows of a subject as it was measured last; others were on other data."""
        rows = [row for row in self.rows.values() if row["subject"] == subject]
        return [row for row in rows if row["digest"] == rows[-1]["digest"]]

    def find(self, subject: str, family: str, name: str) -> Row | None:
        """A measured row, or None."""
        rows = [r for r in self.of(subject) if (r["family"], r["name"]) == (family, name) and "figures" in r]
        return rows[0] if rows else None


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(row[k] for k in KEY)


def _short(x: Any) -> Any:
    """The same with floats of seven digits: what is shown has three, and a file of them is kept."""
    if isinstance(x, dict):
        return {k: _short(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_short(v) for v in x]
    return float(f"{x:.7g}") if isinstance(x, float) else x
