"""Tables as text, as wide as the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from typing import Any

LEAST = 80  # columns of the text, also in a narrower terminal
NAME, NOTE, CELL = 26, 20, 12  # characters that names, notes and other texts keep


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = (), title: str = "",
    caption: str = "", drop: Sequence[str] = (), whole: bool = False,
) -> str:  # fmt: skip
    """A table with a title above and a caption below. Columns without any text are left out.

    right   columns that are right-aligned
    drop    columns that a narrow terminal does without, the first one first
    whole   nothing is cut or left out

    If the table is wider than the terminal, in this order: the column "note" is folded, names in the first column lose
    their beginning ("…mlp.down_proj.weight"), notes move below the names, columns are dropped, cells are folded.
    """
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max(LEAST, shutil.get_terminal_size((150, 50)).columns)
    cells = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    first = columns[0]
    cells = {name: column for name, column in cells.items() if name == first or any(column) or not rows}
    sizes = {name: _longest([name, *column]) for name, column in cells.items()}
    most: dict[str, int] = {}

    def over() -> int:
        return sum(most.get(name, sizes[name]) for name in cells) + 3 * len(cells) + 1 - width

    def narrow(name: str, least: int) -> None:
        if name in cells and over() > 0:
            most[name] = max(min(least, sizes[name]), sizes[name] - over())

    left_out = []
    narrow("note", NOTE)
    if not whole:
        narrow(first, NAME)
        below = cells.pop("note") if over() > 0 and "note" in cells else [""] * len(rows)
        for name in drop:
            if over() > 0 and cells.pop(name, None) is not None:
                left_out.append(name)
        most.pop(first, None)
        narrow(first, NAME)
        for name in sorted(cells.keys() - {first}, key=lambda name: -sizes[name]):
            narrow(name, CELL)
        names = [_cut(name, most.get(first, sizes[first])) for name in cells[first]]
        cells[first] = [f"{name}\n  {note}" if note else name for name, note in zip(names, below, strict=True)]
    if left_out:
        caption += f"\nnot shown in {width} columns: {', '.join(left_out)}"
    table = Table(title=Text(title) if title else None, title_justify="left", caption_justify="left")
    table.caption = Text(caption)
    for name in cells:
        least = min(NAME, sizes[name]) if name == first and not whole else None
        justify: Any = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", min_width=least, max_width=most.get(name))
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))  # Text: rich would parse brackets as markup
    out = StringIO()
    Console(file=out, width=width).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


def _longest(texts: Sequence[str]) -> int:
    return max(len(line) for text in texts for line in text.split("\n"))


def _cut(name: str, size: int) -> str:
    """The end of a name."""
    return name if len(name) <= size else f"…{name[len(name) - size + 1 :]}"
