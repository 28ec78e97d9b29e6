"""Links of a page to a file that is no page: to the repository. Links to CONTRIBUTING.md and others: to their pages.

A page links ``../examples/first_model.py`` by its relative path, so that the link works where the repository is hosted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

from .project import DOCS, ROOT, source_url

# Files outside docs/ that are pages of the site
PAGES = {
    "CHANGELOG.md": "development/changelog",
    "CONTRIBUTING.md": "development/contributing",
    "README.md": "index",
    "SECURITY.md": "development/security",
}


def rewrite(app: Any, doctree: nodes.document) -> None:
    """Runs before Sphinx collects downloads, which would copy each linked file into the site."""
    docname = app.env.docname
    for node in list(doctree.findall(lambda n: isinstance(n, (addnodes.download_reference, addnodes.pending_xref)))):
        if node.get("reftype") != "myst":
            continue
        target, _, anchor = node["reftarget"].partition("#")
        anchor = anchor or node.get("reftargetid") or ""
        base = DOCS if node.get("refdomain") == "doc" else (DOCS / docname).parent
        path = Path(base, target)
        if node.get("refdomain") == "doc" and not path.exists():
            path = path.with_name(f"{path.name}.md")
        path = path.resolve()
        if not target or not path.exists() or not path.is_relative_to(ROOT):
            continue  # unknown targets are Sphinx's to report
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            page = addnodes.pending_xref(
                "", *node.children, refdomain="doc", reftype="myst", reftarget=PAGES[name], refdoc=docname,
                refexplicit=True, reftargetid=anchor or None,
            )  # fmt: skip
            node.replace_self(page)
        elif not path.is_relative_to(DOCS) or path.is_dir() or path.suffix == ".py":
            url = source_url(path) + (f"#{anchor}" if anchor else "")
            node.replace_self(nodes.reference("", "", *node.children, refuri=url, internal=False))


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", rewrite, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
