"""Docstrings as reStructuredText.

The package writes docstrings to be read in an editor. Three habits of theirs mean something else to docutils:

- a table of arguments in two columns, ``name    what it is``, with continued lines under the second column. It becomes
  a definition list;
- an indented formula or listing after a blank line. It becomes a literal block;
- names such as ``quantize_`` or ``*args`` without backquotes. They are escaped.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_NAME = r'(?:"[^"]+"|[\w*.\[\]="]+)'
_ROW = re.compile(rf"^(?P<name>{_NAME}(?:(?:, | / |, \.\., ){_NAME})*) {{2,}}(?P<text>\S.*)$")
# A value of an argument, in the second column: "4.25 bpw"   bits per weight
_VALUE = re.compile(r'^(?P<name>"[^"]+") {2,}(?P<text>\S.*)$')
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


def _row(line: str, column: int) -> tuple[str, str] | None:
    """The two columns of a row: two spaces apart, or a name that fills its column."""
    if match := _ROW.match(line):
        return match["name"], match["text"]
    name, text = line[:column].rstrip(), line[column:]
    if len(name) == column - 1 and re.fullmatch(_NAME, name) and text:
        return name, text
    return None


def _column(lines: list[str]) -> int:
    """Where the second column of a table begins: that of its first row."""
    match = _ROW.match(lines[0])
    return match.start("text") if match else 0


def _table(lines: list[str], at: int) -> int:
    """The end of the table of arguments that begins at a line, or ``at`` if none does.

    Each line at the margin is a row; indented lines continue it.
    """
    column = _column(lines[at:])
    if not column:
        return at
    end = at + 1
    while end < len(lines) and lines[end].strip():
        if _indent(lines[end]) == 0 and _row(lines[end], column) is None:
            return at
        end += 1
    return end


def _rows(lines: list[str]) -> list[str]:
    """A table of arguments as a definition list."""
    out: list[str] = []
    column, in_list = _column(lines), False
    for line in lines:
        if _indent(line) == 0 and (row := _row(line, column)):
            names = ", ".join(f"``{name}``" for name in re.split(r", | / ", row[0]))
            out += ["", names, f"    {escape(row[1])}"]
            in_list = False
        elif value := _VALUE.match(line.strip()):
            out += [*([] if in_list else [""]), f"    - ``{value['name']}``: {escape(value['text'])}"]
            in_list = True
        else:
            out.append(f"    {'  ' * in_list}{escape(line.strip())}")
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
    inherited = what == "data" and "\n".join(lines).strip() == (inspect.getdoc(type(obj)) or "").strip()
    lines[:] = [] if inherited else convert(lines)  # a constant's page describes it, not the docstring of dict


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
