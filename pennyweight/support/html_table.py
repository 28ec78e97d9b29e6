"""Small HTML tables for notebooks. They take the notebook's colours, so that they can be read in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

SHOWN = 30  # rows; the others are folded

_LINE = "1px solid rgba(128,128,128,.35)"
_CELL = "padding:.2em .7em;background:transparent;color:inherit;vertical-align:top;white-space:pre-line;"


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
    parts = [f"<div><b>{escape(title)}</b></div>"] if title else []
    if rows:
        parts.append(_table(head + _body(body[:SHOWN])))
    if len(rows) > SHOWN:
        summary = f"<summary>{len(rows) - SHOWN} more rows</summary>"
        parts.append(f"<details>{summary}{_table(head + _body(body[SHOWN:]))}</details>")
    parts += [f'<div style="opacity:.75">{escape(line)}</div>' for line in notes]
    return f'<div class="pennyweight" style="font-size:90%;overflow-x:auto">{"".join(parts)}</div>'


def html_columns(counts: Sequence[int], label: str) -> str:
    """A small column chart in the colour of the text; ``label`` is its accessible text."""
    top, width = max(max(counts, default=0), 1), 6
    bars = "".join(
        f'<rect x="{i * width}" y="{40 - 40 * n / top:.1f}" width="{width - 1}" height="{40 * n / top:.1f}"/>'
        for i, n in enumerate(counts)
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width * len(counts)}" height="40" fill="currentColor" '
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
        f'<{tag} style="{_CELL}{weight}text-align:{"right" if name in right else "left"}">{escape(cell)}</{tag}>'
        for cell, name in zip(cells, columns or [""] * len(cells), strict=True)
    ]
    return f'<tr style="background:transparent;border:none;border-bottom:{_LINE}">{"".join(made)}</tr>'
