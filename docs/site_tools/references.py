"""Roles in docstrings that name something without an entry of its own in the reference.

With ``nitpicky`` Sphinx warns about each reference that it cannot resolve. Docstrings are written for readers of the
code: they name functions of their own module without its path, and functions that are not public. Here such a name

- links to the only entry of that name, if there is one;
- stays plain text if the package or an installed library defines it;
- is reported otherwise: it is a mistake, or the thing was renamed.
"""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from typing import Any

from docutils import nodes
from sphinx.util.nodes import make_refnode

from .project import ROOT

# Names in annotations as the code imports them
_SHORT = {"nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy", "pw": "pennyweight", "dist": "torch.distributed"}


@cache
def defined_names() -> frozenset[str]:
    """Every name that a module of the package defines: modules, classes, functions, attributes, type parameters."""
    names: set[str] = set()
    for path in (ROOT / "pennyweight").rglob("*.py"):
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                names.update(alias.asname or alias.name for alias in node.names)
    return frozenset(names)


@cache
def importable(target: str) -> bool:
    """Whether an installed library, or Python, has this name."""
    parts = target.split(".")
    parts[:1] = _SHORT.get(parts[0], parts[0]).split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return hasattr(importlib.import_module("builtins"), target) or any(
        hasattr(importlib.import_module(module), target) for module in ("typing", "collections.abc", "torch", "pathlib")
    )


def resolve(app: Any, env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".~")
    last = target.rpartition(".")[2]
    objects = env.domains.python_domain.objects
    found = [name for name in objects if name == target or name.endswith(f".{target}")]
    found = found or [name for name in objects if name.rpartition(".")[2] == last]
    found = [name for name in found if name.rpartition(".")[0] == "pennyweight"] or found
    if len(found) == 1:
        entry = objects[found[0]]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, found[0])
    # A default or a union that Sphinx did not take apart: "Granularity | tuple[~pennyweight.Granularity"
    names = [name for name in re.split(r"[\[\]|, ~]+", target) if name]
    known = all(name.rpartition(".")[2] in defined_names() or importable(name) for name in names)
    return content if known else None


def setup(app: Any) -> dict[str, bool]:
    app.connect("missing-reference", resolve, priority=900)  # after intersphinx
    return {"parallel_read_safe": True, "parallel_write_safe": True}
