"""Facts of the project that the site needs, read from pyproject.toml and the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

# Pages for those who change the code: read in the repository, no part of the site
REPOSITORY_ONLY = ("design", "log.md")

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
URLS: dict[str, str] = _PROJECT["urls"]
REPOSITORY = URLS["Repository"].rstrip("/")
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)
VERSION = _VERSION.findall((ROOT / "pennyweight" / "support" / "version.py").read_text(encoding="utf-8"))[0]


def source_url(path: Path, lines: str = "") -> str:
    """The address of a file or folder of the repository. lines: "#L1-L9" or nothing."""
    kind = "tree" if path.is_dir() else "blob"
    return f"{REPOSITORY}/{kind}/main/{path.relative_to(ROOT).as_posix()}{lines}"
