"""The versions of the site: a folder for each, and versions.json, which the theme's switcher reads.

build/site/versions.json    [{"name", "version", "url", "preferred"}, ...], newest first
build/site/index.html       leads to the preferred version
build/site/latest/          the working tree
build/site/v0.1.0/          a tag
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import tempfile
from pathlib import Path

from .project import ROOT

LATEST = "latest"
_TAG = re.compile(r"v(\d+)\.(\d+)\.(\d+)((?:a|b|rc)\d+)?")


def is_tag(name: str) -> bool:
    return _TAG.fullmatch(name) is not None


def _key(name: str) -> tuple[int, int, int, bool, str]:
    match = _TAG.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3]), match[4] is None, match[4] or ""


def entries(names: list[str], base: str = "/") -> list[dict[str, str | bool]]:
    """Entries of versions.json. base: where the host serves the folders. Names that are no version are left out.

    The newest tag without a suffix such as rc1 is preferred; without one, "latest".
    """
    tags = sorted(filter(is_tag, names), key=_key, reverse=True)
    final = [name for name in tags if _key(name)[3]]
    preferred = final[0] if final else LATEST
    out: list[dict[str, str | bool]] = []
    for name in [*([LATEST] if LATEST in names else []), *tags]:
        label = f"{name} (stable)" if name == preferred and name != LATEST else name
        out.append({"name": label, "version": name, "url": f"{base}{name}/", "preferred": name == preferred})
    return out


def write(site: Path, base: str = "/") -> list[dict[str, str | bool]]:
    """Write versions.json and index.html for the folders of a site that contain a built version."""
    found = entries([path.parent.name for path in site.glob("*/index.html")], base)
    (site / "versions.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    name = html.escape(next(str(entry["version"]) for entry in found if entry["preferred"]))
    link = f"{name}/index.html"
    (site / "index.html").write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pennyweight</title>'
        f'<meta http-equiv="refresh" content="0; url={link}"></head>'
        f'<body><a href="{link}">Documentation</a></body></html>\n',
        encoding="utf-8",
    )
    return found


def write_hosted() -> Path:
    """A folder with versions.json for Read the Docs, which serves each version under /en/ and knows the tags of git."""
    tags = subprocess.run(["git", "tag"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    folder = Path(tempfile.mkdtemp())
    (folder / "versions.json").write_text(json.dumps(entries([LATEST, *tags], "/en/")), encoding="utf-8")
    return folder
