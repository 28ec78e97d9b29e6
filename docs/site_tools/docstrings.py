"""Docstrings as reStructuredText.

The package writes docstrings to be read in an editor. Three habits of theirs mean something else to docutils:

- a table of arguments in two columns, ``name    what it is``, with continued lines under the second column. It becomes
  a definition list;
- an indented formula or listing after a blank line. It becomes a literal block;
- names such as ``quantize_`` or ``*args`` without backquotes. They are escaped.
"""

from __future__ import annotations

import re
from typing import Any

_ROW = re.compile(r"^(?P<indent> *)(?P<name>[\w*.\[\]]+(?:(?:, | / |, \.\., )[\w*.\[\]]+)*)(?P<gap> {2,})(?P<text>\S.*)$")
_ITEM = re.compile(r"^(?:[-*] |\d+\. |\.\. |:\w)")
# ``literals``, roles, `links`_ and backquoted words stay as they are
_KEPT = re.compile(r"(``.+?``|:[\w:]+:`[^`]+`|`[^`]+`_?)")
_TRAILING = re.compile(r"(?<=\w)_(?!\w)")
_SPECIAL = re.compile(r"[*|](?=\S)|(?<=\S)[*|]")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def escape(text: str) -> str:
    """Escape ``*``, ``|`` and names that end in an underscore, outside of literals and roles."""
    pieces = _KEPT.split(text)
    for i in range(0, len(pieces), 2):
        pieces[i] = _SPECIAL.sub(lambda m: f"\\{m[0]}", _TRAILING.sub(r"\\_", pieces[i]))
    return "".join(pieces)


def _table(lines: list[str], at: int) -> int:
    """The end of the table of arguments that begins at a line, or ``at`` if none does."""
    first = _ROW.match(lines[at])
    if first is None:
        return at
    indent, column = len(first["indent"]), first.start("text")
    rows, end = 1, at + 1
    while end < len(lines) and lines[end].strip():
        row = _ROW.match(lines[end])
        if _indent(lines[end]) >= column:
            pass  # a continued line
        elif row is not None and len(row["indent"]) == indent and row.start("text") <= column + 1:
            rows += 1
            column = min(column, row.start("text"))
        else:
            return at
        end += 1
    # A single "word  text" is a table only if it is continued, or stands alone after the summary
    return end if rows > 1 or end > at + 1 or at > 0 else at


def _rows(lines: list[str]) -> list[str]:
    """A table of arguments as a definition list."""
    out: list[str] = []
    column = min(row.start("text") for row in map(_ROW.match, lines) if row is not None and _indent(row[0]) == _indent(lines[0]))
    for line in lines:
        row = _ROW.match(line)
        if row is not None and _indent(line) < column:
            names = ", ".join(f"``{name}``" for name in re.split(r", | / ", row["name"]))
            out += ["", names, f"    {escape(row['text'])}"]
        else:
            out.append(f"    {escape(line.strip())}")
    return [*out[1:], ""]


def convert(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        blank_before = at == 0 or not lines[at - 1].strip()
        if blank_before and line.lstrip().startswith(">>>"):  # a doctest, to the next blank line
            while at < len(lines) and lines[at].strip():
                out.append(lines[at])
                at += 1
            continue
        if blank_before and _indent(line) == 0 and (end := _table(lines, at)) > at:
            out += _rows(lines[at:end])
            at = end
            continue
        if blank_before and _indent(line) > 0 and at > 0 and not _ITEM.match(line.lstrip()):
            at = _block(lines, at, out)
            continue
        out.append(escape(line) if not line.startswith("..") else line)
        at += 1
    return out


def _block(lines: list[str], at: int, out: list[str]) -> int:
    """An indented block after a blank line: literal, unless it continues a list. Returns where it ends."""
    last = next((text for text in reversed(out) if text.strip()), "")
    end = at
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > 0):
        end += 1
    body = lines[at:end]
    if last.startswith((" ", "- ", "..")) or last.endswith("::"):
        out += body
    else:
        out += ["::", "", *body]
    if body[-1].strip():
        out.append("")
    return end


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = convert(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
