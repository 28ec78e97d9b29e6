"""What tests of documentation pages share: fenced blocks in order, links and their anchors, commands of the CLI."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from typer.main import get_command

from pennyweight.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUNS = "<!-- runs -->"  # the line before a console block whose commands the test runs


class Fence(NamedTuple):
    """A fenced block: its language, its text, its first line's number, and whether a line before it says RUNS."""

    language: str
    text: str
    line: int
    runs: bool


def fences(page: Path) -> list[Fence]:
    """Fenced blocks in order."""
    found: list[Fence] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            before = next((text for text in reversed(lines[:start]) if text.strip()), "")
            text = "\n".join(lines[start + 1 : number])
            found.append(Fence(lines[start][3:].strip(), text, start + 2, before == RUNS))
            start = None
    assert start is None, f"{page}: a block is not closed"
    return found


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def links(page: Path) -> list[str]:
    """Targets of links and images of the prose, without those of the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
    return [target for target in found if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """Names of headings as a repository host makes them: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", text) for text in headings]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.strip().lower())) for text in plain}


def dead(page: Path) -> list[str]:
    """Links of a page to a missing file or heading."""
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def commands(fence: Fence) -> list[list[str]]:
    """Arguments of each ``pennyweight`` command of a console block; a backslash continues a line."""
    lines = re.sub(r"\\\n\s*", " ", fence.text).splitlines()
    shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [shlex.split(line, comments=True)[1:] for line in shown if line.startswith("pennyweight ")]


def parse(arguments: list[str]) -> None:
    """Raises click's error unless the command line accepts the arguments; nothing is run."""
    group = get_command(app)
    context = group.make_context("pennyweight", list(arguments))
    name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
    command.make_context(name, rest, parent=context)
