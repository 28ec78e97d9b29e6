"""Tables for terminals and pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from io import StringIO

_UNBOUNDED = 10_000  # width for pipes: lines are not folded, so that grep finds names


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; columns in ``right`` are right-aligned. As wide as the terminal, or as the text if there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        out.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        out.add_row(*map(Text, row))  # Text: rich would parse "[64]" as markup
    terminal = sys.stdout.isatty()
    buffer = StringIO()
    Console(file=buffer, width=Console().width if terminal else _UNBOUNDED, force_terminal=terminal).print(out)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
