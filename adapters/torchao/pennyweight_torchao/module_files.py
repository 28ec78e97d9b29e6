"""What Python's tools ask of a module besides its names: file, source, submodules, resources.

``torchao.__file__``, ``inspect.getsourcefile``, ``pkgutil.walk_packages(torchao.__path__)``, ``importlib.resources``,
``runpy`` and ``help`` work for virtual modules too. A virtual package's ``__path__`` is a name below this folder that
no file has, so that Python's own finder of files finds nothing there; :class:`Listing` lists its submodules.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources.abc import TraversableResources
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER = Path(__file__).parent
_MARK = "<modules of "


def file_of(homes: Sequence[str], reexports: Mapping[str, tuple[str, Any]]) -> str:
    """The file with a module's first names, or this package's own for a package without any."""
    if not homes:
        return str(FOLDER / "__init__.py")
    if homes[0] in reexports:
        found = importlib.util.find_spec(reexports[homes[0]][0])
        assert found is not None
        assert found.origin is not None
        return found.origin
    return str(FOLDER.joinpath(*homes[0].split(".")).with_suffix(".py"))


def search_path(fullname: str) -> list[str]:
    """``__path__`` of a virtual package."""
    return [str(FOLDER / f"{_MARK}{fullname}>")]


class Listing(importlib.abc.PathEntryFinder):
    """Lists the submodules of a virtual package for :func:`pkgutil.iter_modules`. They are found through sys.meta_path,
    so it finds none."""

    def __init__(self, fullname: str, inner: str, modules: Collection[str], packages: Collection[str]) -> None:
        self.fullname, self.inner, self.modules, self.packages = fullname, inner, modules, packages

    def find_spec(self, fullname: str, target: Any = None) -> None:
        return None

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """(prefix + name, whether it is a package) of the direct submodules."""
        for path in sorted({*self.modules, *self.packages} - {""}):
            parent, _, name = path.rpartition(".")
            if parent == self.inner:
                yield prefix + name, path in self.packages


def add_hook(prefix: str, modules: Collection[str], packages: Collection[str]) -> Any:
    """Let pkgutil list the packages under a prefix. Returns the hook, for :func:`remove_hook`."""

    def hook(entry: str) -> Listing:
        name = Path(entry).name
        fullname = name.removeprefix(_MARK).removesuffix(">")
        inside = fullname == prefix or fullname.startswith(f"{prefix}.")
        if not name.startswith(_MARK) or not inside or Path(entry).parent != FOLDER:
            raise ImportError(f"{entry} is not a package of {prefix}")
        return Listing(fullname, fullname.removeprefix(prefix).lstrip("."), modules, packages)

    sys.path_hooks.insert(0, hook)
    return hook


def remove_hook(hook: Any) -> None:
    """Undo :func:`add_hook`."""
    sys.path_hooks.remove(hook)
    for entry, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, Listing):
            del sys.path_importer_cache[entry]


class Resources(TraversableResources):
    """``importlib.resources.files(package)``: the folder of this package."""

    def files(self) -> Any:
        return FOLDER


def code_of(fullname: str) -> CodeType:
    """What ``python -m`` and runpy run for a module: nothing, as for a module that only defines names."""
    return compile(f'"""{fullname}, served by pennyweight."""', f"<{fullname}>", "exec")
