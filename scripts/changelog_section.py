"""Prints the section of a version in CHANGELOG.md; fails if there is none.

python scripts/changelog_section.py 0.1.0 [CHANGELOG.md]
"""

import re
import sys
from pathlib import Path


def section(changelog: str, version: str) -> str:
    """The text under "## [version] - date". Raises SystemExit if it is missing, has no date or is empty."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)
    found = [part for part in parts if part.startswith(f"[{version}]")]
    if len(found) != 1:
        raise SystemExit(f"CHANGELOG.md has {len(found)} sections for {version}, expected one: ## [{version}] - DATE")
    title, _, text = found[0].partition("\n")
    if not re.fullmatch(r"\[[^]]+\] - \d{4}-\d{2}-\d{2}", title.strip()):
        raise SystemExit(f"CHANGELOG.md: ## {title.strip()} has no date (YYYY-MM-DD)")
    if not text.strip():
        raise SystemExit(f"CHANGELOG.md: the section of {version} is empty")
    return text.strip()


if __name__ == "__main__":
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[1] / "CHANGELOG.md"
    print(section(path.read_text("utf-8"), sys.argv[1]))
