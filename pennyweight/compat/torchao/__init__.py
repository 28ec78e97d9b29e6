"""torchao's module tree with the public names of its releases 0.8 to 0.18, as thin adapters over pennyweight.

``from pennyweight.compat.torchao.quantization import quantize_, int8_weight_only`` works directly; after
``pennyweight.compat.install("torchao")``, ``from torchao.quantization import ...`` works too. The modules are virtual:
``module_tree.py`` maps each module to the files with its names, ``removed.py`` lists missing names and replacements.
"""

from __future__ import annotations

import sys

from .module_tree import TREE
from .removed import why_missing
from .virtual_modules import VirtualModules

VERSION = "0.18.0"  # of torchao: the newest release whose names are all in the tree


def modules(prefix: str, version: str | None = None) -> VirtualModules:
    """The finder of the tree under a prefix."""
    return VirtualModules(prefix, __name__, TREE, why_missing, version)


_FINDER = modules(__name__)
sys.meta_path.insert(0, _FINDER)
_FINDER.hook()
_FINDER.exec_module(sys.modules[__name__])
