"""Dead links of a built site: every link and image to a file of it, and every anchor, must exist.

Addresses of other hosts are listed in the site's external-links.txt, and only their form is checked: the check needs no
network. ``scripts/docs --linkcheck`` asks the hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

EXTERNAL = "external-links.txt"
_ATTRIBUTES = {
    "a": "href",
    "link": "href",
    "img": "src",
    "script": "src",
    "source": "src",
    "iframe": "src",
    "object": "data",
}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("id", "name"):
            if values.get(name):
                self.anchors.add(values[name] or "")
        if (link := values.get(_ATTRIBUTES.get(tag, ""))) is not None:
            self.links.append(link)


@dataclass(frozen=True)
class Found:
    """dead: "page: link: reason". external: the addresses of other hosts, sorted. links: number of links checked."""

    dead: list[str] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    links: int = 0


def check(site: Path) -> Found:
    """Check every page under a folder."""
    site = site.resolve()
    # _static has a template of the theme
    pages = {path: _parse(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    dead: list[str] = []
    external: set[str] = set()
    links = 0
    for path, page in pages.items():
        for link in page.links:
            links += 1
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                if parts.scheme not in ("http", "https", "") or "." not in parts.netloc or " " in link:
                    dead.append(f"{path.relative_to(site)}: {link}: no valid address")
                external.add(link)
            elif reason := _local(site, path, parts.path, unquote(parts.fragment), pages):
                dead.append(f"{path.relative_to(site)}: {link}: {reason}")
    return Found(dead, sorted(external), links)


def _parse(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _local(site: Path, page: Path, target: str, anchor: str, pages: dict[Path, _Page]) -> str:
    """Why a link into the site is dead, or nothing."""
    file = (page.parent / unquote(target)).resolve() if target else page
    if target.endswith("/") or file.is_dir():
        file /= "index.html"
    if not file.is_relative_to(site):
        return "leads out of the site"
    if not file.exists():
        return "no such file"
    # "#" and "#top" are the page's start
    if anchor and anchor != "top" and file in pages and anchor not in pages[file].anchors:
        return "no such anchor"
    return ""
