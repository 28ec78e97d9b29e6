"""Compatibility layers: other libraries' names over ours. No other package imports this one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from typing import Any

__all__ = ["install", "install_if_asked", "uninstall"]

_INSTALLED: dict[str, Any] = {}
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
    from .torchao import reading, shown_class
    from .torchao.operators import affine

    finder = torchao.modules(name, version or torchao.VERSION)
    sys.meta_path.insert(0, finder)
    finder.hook()
    _INSTALLED[name] = finder
    importlib.invalidate_caches()
    reading.allow(name)
    shown_class.show()
    affine.keep_in_exports()
    early = [client for client in _CLIENTS if client in sys.modules]
    if early and not had:
        warnings.warn(
            f"{', '.join(early)} is already imported and did not find {name}; call "
            f"pennyweight.compat.install({name!r}) before importing it",
            stacklevel=2,
        )


def install_if_asked() -> None:
    """:func:`install` torchao's names if the environment has ``PENNYWEIGHT_TORCHAO=1``.

    A plug-in of vLLM, which runs it in each of its processes: its own method "torchao" then computes with our tensors.
    """
    if os.environ.get("PENNYWEIGHT_TORCHAO") == "1":
        with warnings.catch_warnings():  # vLLM has imported transformers, and looks for torchao when it needs it
            warnings.simplefilter("ignore")
            install("torchao")


def uninstall(name: str = "torchao") -> None:
    """Undo :func:`install`. Names already imported elsewhere stay valid."""
    finder = _INSTALLED.pop(name, None)
    if finder is not None:
        from .torchao import shown_class
        from .torchao.configs import assignment
        from .torchao.operators import affine

        shown_class.hide()
        assignment.freeze_again()
        affine.trace_in_exports()
        sys.meta_path.remove(finder)
        finder.unhook()
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]
