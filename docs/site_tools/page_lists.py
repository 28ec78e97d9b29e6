"""Parts of pages that are made at the build: lists of pages for the navigation, and the table of notebooks.

Lists have the order in which the page above links its pages, which is that of tasks; not that of file names.

Pages that are also read where the repository is hosted stay plain Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import notebooks
from .project import DOCS, ROOT

# Pages whose folder is below them in the navigation
BELOW = ("algorithms/README", "concepts/index", "guides/index")
_PATTERN = re.compile(r"^(\w+)/\*$", re.M)  # in a list of a page: all pages of a folder


def below(page: Path) -> list[str]:
    """The other pages of a page's folder, by name: those that it links, in its order, then the rest."""
    names = sorted(path.stem for path in page.parent.glob("*.md") if path != page)
    return _as_linked(page.read_text(encoding="utf-8"), r"\]\((\w+)\.md[)#]", names)


def _as_linked(text: str, link: str, names: list[str]) -> list[str]:
    linked = [name for name in dict.fromkeys(re.findall(link, text)) if name in names]
    return linked + [name for name in names if name not in linked]


def _folder(text: str, folder: str) -> list[str]:
    """The pages of a folder for a list; notebooks in the order of the tutorials that they belong to."""
    names = sorted({path.stem for path in (DOCS / folder).iterdir() if path.suffix in (".md", ".ipynb")})
    return [f"{folder}/{name}" for name in _as_linked(text, r"\]\(tutorials/(\w+)\.md\)", names)]


def notebook_table() -> str:
    """A row for each tutorial: page, notebook or the reason why there is none, script."""
    made = {script.stem for script in notebooks.scripts()}
    found = {path.stem: path for path in (ROOT / "examples").rglob("*.py")}
    rows = ["| tutorial | notebook | script |", "|---|---|---|"]
    for page in sorted((DOCS / "tutorials").glob("*.md"), key=lambda path: notebooks.title(path.stem)):
        name = page.stem
        link = f"[{name}.ipynb](notebooks/{name}.ipynb)" if name in made else f"none: {notebooks.LEFT_OUT[name]}"
        script = found[name].relative_to(ROOT).as_posix()
        rows.append(f"| [{notebooks.title(name)}](tutorials/{name}.md) | {link} | [{name}.py](../{script}) |")
    return "\n".join(rows)


TABLES = {
    "<!-- notebooks -->": notebook_table,
}


def add(app: Any, docname: str, source: list[str]) -> None:
    """Append a hidden list to a page of BELOW, write out folders in lists, and insert the tables."""
    text = source[0]
    source[0] = _PATTERN.sub(lambda match: "\n".join(_folder(text, match[1])), text)
    if docname in BELOW:
        names = "\n".join(below(DOCS / f"{docname}.md"))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    for mark, table in TABLES.items():
        if mark in source[0]:
            source[0] = source[0].replace(mark, table())


def mark_drawings(app: Any, doctree: Any) -> None:
    """Class "on-white" for SVG files that do not adapt to a dark page; the style sheet gives them a white one."""
    for image in doctree.findall(lambda node: node.tagname == "image"):
        path = Path(app.srcdir, image["uri"])
        if path.suffix != ".svg" or not path.exists() or "only-dark" in image["classes"]:
            continue
        if "prefers-color-scheme" not in path.read_text(encoding="utf-8"):
            image["classes"].append("on-white")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", add)
    app.connect("doctree-read", mark_drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
