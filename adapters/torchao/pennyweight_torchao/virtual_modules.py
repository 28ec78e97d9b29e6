"""The finder that serves a table of modules (module_tree.py) as virtual modules, under torchao's name or our own."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dis import opmap
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from . import module_files
from .module_tree import REEXPORTS

__all__ = ["VirtualModules"]

_IMPORT_FROM = opmap["IMPORT_FROM"]


class VirtualModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the modules of a table, under a prefix.

    tree     module path below the prefix ("" is the root) -> files of ``home`` whose names it exposes, and reexports
    missing  (path of a module, name in it or None) -> why it is missing and what to use instead, or None
    version  the result of ``importlib.metadata.version(prefix)``; None: no metadata
    """

    def __init__(
        self, prefix: str, home: str, tree: Mapping[str, Sequence[str]],
        missing: Callable[[str, str | None], str | None], version: str | None = None,
    ) -> None:  # fmt: skip
        self.prefix, self.home, self.tree, self.missing, self.version = prefix, home, tree, missing, version
        self.packages = {path.rpartition(".")[0] for path in tree if path} | {""}

    def _path(self, fullname: str) -> str | None:
        if fullname == self.prefix:
            return ""
        start = f"{self.prefix}."
        return fullname.removeprefix(start) if fullname.startswith(start) else None

    # -- finding and loading -----------------------------------------------------------------------------------------

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inner = self._path(fullname)
        if inner is None or (inner == "" and self.prefix == self.home):
            return None
        if inner in self.tree:
            is_package = inner in self.packages
            spec = importlib.machinery.ModuleSpec(
                fullname, self, origin=self.get_filename(fullname), is_package=is_package
            )
            if is_package:
                spec.submodule_search_locations = module_files.search_path(fullname)
            return spec
        why = self.missing(inner, None)
        if why is not None:
            raise ModuleNotFoundError(f"{fullname}: {why}", name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Virtual(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        inner = self._path(module.__name__)
        assert inner is not None
        homes = self.tree[inner]

        def get(name: str) -> Any:
            if name == "__all__":
                return sorted({n for home in homes for n in self._names(home)[1]})
            if not (name.startswith("__") and name.endswith("__")) and not self._is_file(inner, name):
                for home in homes:
                    source, names = self._names(home)
                    if name in names or (home not in REEXPORTS and name in source.__dict__):
                        value = getattr(source, name)
                        aliased = self.prefix != self.home
                        if aliased and isinstance(value, type) and hasattr(value, "__dataclass_fields__"):
                            importlib.import_module(f"{self.home}.configs.assignment").enable(value)
                        setattr(module, name, value)
                        return value
                path = f"{inner}.{name}" if inner else name
                if path in self.tree:  # a submodule that the real package imports itself
                    return importlib.import_module(f"{module.__name__}.{name}")
                why = self.missing(inner, name)
                if why is not None:
                    raise _no_name(f"{module.__name__}.{name}: {why}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__doc__ = f"{module.__name__}, served by pennyweight."
        if not hasattr(module, "__file__"):  # the home itself has one
            module.__file__ = self.get_filename(module.__name__)
        module.__getattr__ = get  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({*module.__dict__, *get("__all__")})  # type: ignore[method-assign]
        if inner == "" and self.version is not None:
            module.__version__ = self.version  # type: ignore[attr-defined]

    def _is_file(self, inner: str, name: str) -> bool:
        """Whether ``from . import name`` of a file here asks, which imports the file itself: to search it among the
        root's names would import their files first, in a cycle."""
        at_home = inner == "" and self.prefix == self.home
        path = sys.modules[self.home].__path__ if at_home else []
        return at_home and importlib.machinery.PathFinder.find_spec(f"{self.home}.{name}", path) is not None

    def _names(self, home: str) -> tuple[ModuleType, Sequence[str]]:
        """The module behind an entry of the tree, and its public names."""
        if home in REEXPORTS:
            path, names = REEXPORTS[home]
            return importlib.import_module(path), names.split()
        module = importlib.import_module(f"{self.home}.{home}")
        return module, module.__all__

    # -- files -------------------------------------------------------------------------------------------------------

    def get_filename(self, fullname: str) -> str:
        """The file with the first names of a module. Raises ImportError for another module."""
        inner = self._path(fullname)
        if inner not in self.tree:
            raise ImportError(f"{fullname} is not a module of {self.prefix}", name=fullname)
        return module_files.file_of(self.tree[inner] if inner else (), REEXPORTS)

    def get_source(self, fullname: str) -> str:
        """The text of :meth:`get_filename`."""
        return Path(self.get_filename(fullname)).read_text(encoding="utf-8")

    def get_code(self, fullname: str) -> CodeType:
        """The code for ``python -m``: none of the file runs again."""
        self.get_filename(fullname)
        return module_files.code_of(fullname)

    def is_package(self, fullname: str) -> bool:
        return self._path(fullname) in self.packages

    def get_resource_reader(self, fullname: str) -> module_files.Resources:
        return module_files.Resources()

    def hook(self) -> None:
        """Let pkgutil list the modules; :meth:`unhook` undoes it."""
        self._hook = module_files.add_hook(self.prefix, self.tree, self.packages)

    def unhook(self) -> None:
        module_files.remove_hook(self._hook)

    # -- metadata ----------------------------------------------------------------------------------------------------

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        asked = getattr(context, "name", None)
        if self.version is not None and asked in (None, self.prefix):
            yield _Metadata(self.prefix, self.version)


def _no_name(text: str) -> Exception:
    """ImportError for ``from module import name``, which would discard the text of an AttributeError; else
    AttributeError, so that hasattr() and getattr() with a default work."""
    frame = sys._getframe(2)
    code = frame.f_code.co_code
    asked = 0 <= frame.f_lasti < len(code) and code[frame.f_lasti] == _IMPORT_FROM
    return ImportError(text) if asked else AttributeError(text)


class _Virtual(ModuleType):
    """A module whose own names take precedence over its submodules: ``quantization.quantize_`` is a function and a
    package, and importing the package must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in self.__getattr__("__all__"):
            return
        super().__setattr__(name, value)


class _Metadata(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: served by pennyweight\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path
