"""Serves ``import torchao`` from :mod:`pennyweight.compat.torchao`: virtual modules and their metadata."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dis import opmap
from types import ModuleType
from typing import Any

_IMPORT_FROM = opmap["IMPORT_FROM"]


class VirtualModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and creates the modules of a table, under a prefix.

    tree     module path below the prefix ("" is the root) -> files of ``home`` whose names it exposes
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
            return importlib.machinery.ModuleSpec(fullname, self, is_package=inner in self.packages)
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
                return sorted({n for home in self._homes(homes) for n in home.__all__})
            if not (name.startswith("__") and name.endswith("__")):
                for home in self._homes(homes):
                    if name in home.__dict__ or name in home.__all__:
                        value = getattr(home, name)
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
        module.__getattr__ = get  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({*module.__dict__, *get("__all__")})  # type: ignore[method-assign]
        if inner == "" and self.version is not None:
            module.__version__ = self.version  # type: ignore[attr-defined]

    def _homes(self, names: Sequence[str]) -> Iterable[ModuleType]:
        return (importlib.import_module(f"{self.home}.{name}") for name in names)

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


_INSTALLED: dict[str, VirtualModules] = {}
_CLIENTS = ("transformers", "peft", "diffusers", "accelerate")  # look for torchao at import


def install(name: str = "torchao", version: str | None = None) -> None:
    """Make ``import torchao`` in this process load :mod:`pennyweight.compat.torchao`, with its torchao version.

    The names of all releases from 0.8 to 0.18 are available at once. Files written by torchao with ``torch.save`` load,
    also with ``weights_only=True``. ``version`` is the result of ``importlib.metadata.version``, by default that of the
    newest supported torchao release. Call it before anything imports the library. Repeated calls have no effect.

    Raises ValueError for another library, and RuntimeError if the real one is already imported. Warns if a library that
    checks for it only at import is already imported.
    """
    if name != "torchao":
        raise ValueError(f"install({name!r}): the only supported library is 'torchao'")
    if name in _INSTALLED:
        return
    if name in sys.modules:
        where = getattr(sys.modules[name], "__file__", None)
        raise RuntimeError(
            f"{name} is already imported from {where}; call pennyweight.compat.install({name!r}) before the first "
            f"import of it, or of a library that imports it (transformers, diffusers, peft)"
        )
    had = importlib.util.find_spec(name) is not None
    from . import torchao
    from .torchao import pickles

    finder = torchao.modules(name, version or torchao.VERSION)
    sys.meta_path.insert(0, finder)
    _INSTALLED[name] = finder
    importlib.invalidate_caches()
    pickles.allow(name)
    early = [client for client in _CLIENTS if client in sys.modules]
    if early and not had:
        warnings.warn(
            f"{', '.join(early)} is already imported and did not find {name}; call "
            f"pennyweight.compat.install({name!r}) before importing it",
            stacklevel=2,
        )


def uninstall(name: str = "torchao") -> None:
    """Undo :func:`install`. Names already imported elsewhere stay valid."""
    finder = _INSTALLED.pop(name, None)
    if finder is not None:
        sys.meta_path.remove(finder)
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]
