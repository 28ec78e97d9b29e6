"""torchao's names over pennyweight: what its clients import, of its releases 0.8 to 0.18.

``from pennyweight_torchao.quantization import quantize_, Int8WeightOnlyConfig`` works directly; after
:func:`install`, ``from torchao.quantization import ...`` works too, also in libraries that import torchao. The modules
are virtual: ``module_tree.py`` maps each module to the files with its names, ``not_served.py`` lists names that are not
served, and replacements. This package has no arithmetic and no tensor class of quantized weights of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings

import pennyweight  # noqa: F401 - tensors, kernels and hooks

from .module_tree import TREE
from .not_served import why_missing
from .version import TORCHAO, VERSION
from .virtual_modules import VirtualModules

__version__ = VERSION

_CLIENTS = ("transformers", "peft", "diffusers", "accelerate")  # look for torchao at import
_INSTALLED: dict[str, VirtualModules] = {}


def _finder_of(prefix: str, version: str | None = None) -> VirtualModules:
    """The finder of the tree under a prefix."""
    return VirtualModules(prefix, __name__, TREE, why_missing, version)


def install(version: str | None = None) -> None:
    """Make ``import torchao`` in this process load this package.

    Names of the releases from 0.8 to 0.18 are available at once. Files written by torchao with ``torch.save`` load,
    also with ``weights_only=True``. ``version`` is the result of ``importlib.metadata.version("torchao")``, by default
    that of the newest release that was compared. Call it before anything imports torchao. Repeated calls have no
    effect.

    Raises RuntimeError if the real one is already imported. Warns if a library that checks for it only at import is
    already imported.
    """
    name = "torchao"
    if name in _INSTALLED:
        return
    if name in sys.modules:
        where = getattr(sys.modules[name], "__file__", None)
        raise RuntimeError(
            f"{name} is already imported from {where}; call pennyweight_torchao.install() before the first import of "
            "it, or of a library that imports it (transformers, diffusers, peft)"
        )
    had = importlib.util.find_spec(name) is not None
    from . import pickles, shown_class
    from .operators import affine

    finder = _finder_of(name, version or TORCHAO)
    sys.meta_path.insert(0, finder)
    finder.hook()
    _INSTALLED[name] = finder
    importlib.invalidate_caches()
    pickles.allow(name)
    shown_class.show()
    affine.keep_in_exports()
    early = [client for client in _CLIENTS if client in sys.modules]
    if early and not had:
        warnings.warn(
            f"{', '.join(early)} is already imported and did not find {name}; call pennyweight_torchao.install() "
            "before importing it",
            stacklevel=2,
        )


def install_if_asked() -> None:
    """:func:`install` if the environment has ``PENNYWEIGHT_TORCHAO=1``.

    A plug-in of vLLM, which runs it in each of its processes: its own method "torchao" then computes with our tensors.
    """
    if os.environ.get("PENNYWEIGHT_TORCHAO") == "1":
        with warnings.catch_warnings():  # vLLM has imported transformers, and looks for torchao when it needs it
            warnings.simplefilter("ignore")
            install()


def uninstall() -> None:
    """Undo :func:`install`. Names already imported elsewhere stay valid."""
    finder = _INSTALLED.pop("torchao", None)
    if finder is None:
        return
    from . import shown_class
    from .configs import assignment
    from .operators import affine

    shown_class.hide()
    assignment.freeze_again()
    affine.trace_in_exports()
    sys.meta_path.remove(finder)
    finder.unhook()
    for module in [m for m in sys.modules if m == "torchao" or m.startswith("torchao.")]:
        del sys.modules[module]


_FINDER = _finder_of(__name__)
sys.meta_path.insert(0, _FINDER)
_FINDER.hook()
_FINDER.exec_module(sys.modules[__name__])
