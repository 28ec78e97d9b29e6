"""Links of a page to a file that is no page of the site: to the repository. Links to CONTRIBUTING.md and others: to
their pages.

A page links ``../examples/first_model.py`` by its relative path, so that the link works where the repository is hosted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

from .project import DOCS, REPOSITORY_ONLY, ROOT, source_url

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
        path = _path(node, target, docname)
        if path is None:
            continue  # unknown targets are Sphinx's to report
        name = path.relative_to(ROOT).as_posix()
        left_out = any(path.is_relative_to(DOCS / other) for other in REPOSITORY_ONLY)
        if left_out:
            node.replace_self(_external(node, path, anchor))
        elif name in PAGES or (path.is_relative_to(DOCS) and path.suffix in (".md", ".rst", ".ipynb")):
            page = PAGES.get(name) or path.relative_to(DOCS).with_suffix("").as_posix()
            node.replace_self(_page(node, page, anchor, docname))
        elif not path.is_relative_to(DOCS) or path.is_dir() or path.suffix == ".py":
            node.replace_self(_external(node, path, anchor))


def _external(node: nodes.Element, path: Path, anchor: str) -> nodes.Element:
    url = source_url(path) + (f"#{anchor}" if anchor else "")
    return nodes.reference("", "", *node.children, refuri=url, internal=False)


def _path(node: nodes.Element, target: str, docname: str) -> Path | None:
    """The file or folder of the repository that a link leads to. Relative to the file that has the link."""
    if not target:
        return None
    if node.get("refdomain") == "doc":  # MyST has found a page, or a .md file outside docs/
        path = DOCS / target
        found = [path.with_name(path.name + suffix) for suffix in (".md", ".rst", ".ipynb", "")]
    else:
        holder = node
        while holder is not None and not getattr(holder, "source", None):
            holder = holder.parent
        folder = Path(holder.source).parent if holder is not None else DOCS / Path(docname).parent
        found = [folder / target, DOCS / Path(docname).parent / target]
    return next((p.resolve() for p in found if p.exists() and p.resolve().is_relative_to(ROOT)), None)


def _page(node: nodes.Element, page: str, anchor: str, docname: str) -> nodes.Element:
    return addnodes.pending_xref(
        "", *node.children, refdomain="doc", reftype="myst", reftarget=page, refdoc=docname,
        refexplicit=node.get("refexplicit", True), reftargetid=anchor or None,
    )  # fmt: skip


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", rewrite, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
