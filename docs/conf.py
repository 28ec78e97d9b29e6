"""Configuration of the documentation site. Build it with scripts/docs; docs/site_tools has the extensions."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from site_tools import notebooks, versions
from site_tools import project as facts

import pennyweight

# Read the Docs runs Sphinx itself, without scripts/docs
HOSTED = os.environ.get("READTHEDOCS") == "True"
if HOSTED:
    notebooks.write_all()

project = "Pennyweight"
author = copyright = "The Pennyweight authors"
version = release = facts.VERSION
exclude_patterns = ["site_tools", "notebooks/files", *facts.REPOSITORY_ONLY]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinx_design",
    *(f"site_tools.{name}" for name in ("cli_page", "docstrings", "page_lists", "references", "repository_links")),
]
nitpicky = True
smartquotes = False  # prose quotes code
toc_object_entries_show_parents = "hide"

# Pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # site_tools/notebooks.py executes them
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# Reference
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autosummary_generate = False
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True
# Without a network the names of other libraries stay plain text; see site_tools/references.py
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "transformers": ("https://huggingface.co/docs/transformers/main/en", None),
    }
    if HOSTED or "DOCS_INTERSPHINX" in os.environ
    else {}
)

# Theme
html_theme = "pydata_sphinx_theme"
html_title = "Pennyweight"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/logo.svg"
html_logo = "_static/logo.svg"
html_copy_source = False
html_show_sourcelink = False
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_theme_options: dict[str, Any] = {
    "logo": {"text": "Pennyweight", "alt_text": "Pennyweight, home"},
    "icon_links": [{"name": "Repository", "url": facts.REPOSITORY, "icon": "fa-brands fa-github"}],
    "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "github-light",
    "pygments_dark_style": "github-dark",
    # A path relative to the root of this version, read by the browser; on Read the Docs each version has its own copy
    "switcher": {
        "json_url": "versions.json" if HOSTED else "../versions.json",
        "version_match": os.environ.get("READTHEDOCS_VERSION") or os.environ.get("DOCS_VERSION", versions.LATEST),
    },
    "check_switcher": False,
}
if HOSTED:
    html_extra_path = [str(versions.write_hosted())]

linkcheck_anchors = False  # pages that are made by scripts have none to look for
linkcheck_timeout = 20


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The lines of an entry of the reference in the repository."""
    found: Any = sys.modules.get(info["module"])
    for part in info["fullname"].split("."):
        found = getattr(found, part, None)
    found = inspect.unwrap(found.fget if isinstance(found, property) else found) if found is not None else None
    try:
        path = Path(inspect.getsourcefile(found) or "")
        lines, start = inspect.getsourcelines(found)
    except (TypeError, OSError):
        return None  # data, and classes that are made at run time
    package = Path(pennyweight.__file__).parent
    if not path.is_relative_to(package):
        return None
    name = facts.ROOT / "pennyweight" / path.relative_to(package)
    return facts.source_url(name, f"#L{start}-L{start + len(lines) - 1}")
