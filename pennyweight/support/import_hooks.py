"""after_import: run code after another package's module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, call: Callable[[], object]) -> None:
    """Call ``call`` each time the module ``name`` has been executed; immediately if it is already imported.

    Costs one string comparison per later import. An exception in ``call`` propagates from the import.
    """
    sys.meta_path.insert(0, _Watch(name, call))
    if name in sys.modules:
        call()


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module through the other finders and wraps its loader. Stateless, so safe with threads and reloads."""

    def __init__(self, name: str, call: Callable[[], object]) -> None:
        self.name, self.call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        finders = iter(list(sys.meta_path))
        if self not in finders:  # consumes finders up to this one: the earlier ones have run already
            return None
        for finder in finders:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.call)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, then the call. The module keeps its original loader."""

    def __init__(self, loader: Any, call: Callable[[], object]) -> None:
        self.loader, self.call = loader, call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.call()

    def __getattr__(self, name: str) -> Any:  # get_source, is_package: for code that reads only the spec
        return getattr(self.loader, name)
