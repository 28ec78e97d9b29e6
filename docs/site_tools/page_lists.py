"""Parts of pages that are made at the build: lists of pages for the navigation, and the table of notebooks.

Pages that are also read where the repository is hosted stay plain Markdown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import notebooks
from .project import DOCS, ROOT

# page -> pattern of the pages below it in the navigation
BELOW = {
    "algorithms/README": "*",
    "concepts/index": "*",
    "guides/index": "*",
}


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
    """Append a hidden list to a page of BELOW that has none, and insert the tables."""
    if docname in BELOW and "{toctree}" not in source[0]:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{BELOW[docname]}\n```\n"
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
