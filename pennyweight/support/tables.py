"""Tables of results: as text as wide as the terminal, as HTML for notebooks, and as pandas data frames."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

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


# -- HTML, in the colours of the notebook, so that it can be read in light and dark ------------------------------------

SHOWN = 30  # rows; the others are folded
_LINE = "1px solid rgba(128,128,128,.35)"
_CELL = "padding:.2em .7em;background:transparent;color:inherit;vertical-align:top;white-space:pre-line;"


def _escape(text: str) -> str:
    from html import escape  # its tables of names are not needed to import the package

    return escape(text)


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    right: Sequence[str] = (),
    bold: int | None = None,
) -> str:
    """A table as HTML; every text is escaped.

    title, notes   lines above and below it
    right          columns that are right-aligned
    bold           index of a row in bold
    Rows after the first ``SHOWN`` are folded, and shown on a click.
    """
    body = [_row("td", row, columns, right, i == bold) for i, row in enumerate(rows)]
    head = f"<thead>{_row('th', columns, columns, right, True)}</thead>" if columns else ""
    parts = [f"<div><b>{_escape(title)}</b></div>"] if title else []
    if rows:
        parts.append(_table(head + _body(body[:SHOWN])))
    if len(rows) > SHOWN:
        summary = f"<summary>{len(rows) - SHOWN} more rows</summary>"
        parts.append(f"<details>{summary}{_table(head + _body(body[SHOWN:]))}</details>")
    parts += [f'<div style="opacity:.75">{_escape(line)}</div>' for line in notes]
    return f'<div class="pennyweight" style="font-size:90%;overflow-x:auto">{"".join(parts)}</div>'


def html_columns(counts: Sequence[int], label: str) -> str:
    """A small column chart in the colour of the text; ``label`` is its accessible text."""
    top, width = max(max(counts, default=0), 1), 6
    bars = "".join(
        f'<rect x="{i * width}" y="{40 - 40 * n / top:.1f}" width="{width - 1}" height="{40 * n / top:.1f}"/>'
        for i, n in enumerate(counts)
    )
    return (
        f'<svg role="img" aria-label="{_escape(label)}" width="{width * len(counts)}" height="40" fill="currentColor" '
        f'opacity=".6">{bars}</svg>'
    )


def _table(content: str) -> str:
    style = "border-collapse:collapse;border:none;margin:.3em 0;color:inherit;background:transparent"
    return f'<table style="{style}">{content}</table>'


def _body(rows: Sequence[str]) -> str:
    return f"<tbody>{''.join(rows)}</tbody>"


def _row(tag: str, cells: Sequence[str], columns: Sequence[str], right: Sequence[str], bold: bool) -> str:
    weight = "font-weight:bold;" if bold else ""
    made = [
        f'<{tag} style="{_CELL}{weight}text-align:{"right" if name in right else "left"}">{_escape(cell)}</{tag}>'
        for cell, name in zip(cells, columns or [""] * len(cells), strict=True)
    ]
    return f'<tr style="background:transparent;border:none;border-bottom:{_LINE}">{"".join(made)}</tr>'


# -- data frames. pandas is optional: it is imported when one is asked for ---------------------------------------------

TEXT, WHOLE, REAL, FLAG, ANY = "str", "Int64", "Float64", "boolean", "object"  # nullable types of pandas


def to_frame(types: Mapping[str, str], rows: Sequence[Mapping[str, Any]], **attrs: Any) -> DataFrame:
    """A data frame with a column for each of ``types``, of that dtype, and a row for each of ``rows``; None becomes
    missing. ``attrs``: facts about the whole frame, in its ``attrs``. Raises ImportError, with the remedy, without
    pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas; install it with: pip install pandas") from error
    columns = {
        name: pandas.Series([row[name] for row in rows], dtype="string" if kind == TEXT else kind)
        for name, kind in types.items()
    }
    frame = pandas.DataFrame(columns)
    frame.attrs.update(attrs)
    return frame
