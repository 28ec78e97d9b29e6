"""Makes ``save_pretrained`` of transformers and diffusers work for models that were quantized in place.

These libraries call a quantizer object on the model to learn what to write. ``from_pretrained`` attaches it; for a
model quantized in place this module does. The adapters are in a higher layer of the package, so they are listed here by
name and imported only for a model of their library, so that no further library is imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from ..core.tensor import AffineQuantizedTensor


class Library(NamedTuple):
    """A library whose models have ``save_pretrained``.

    module, base  the module that defines its model base class, and the name of the class
    adapter       imports the module of this package with ``settle_(model, quantized, config)``
    """

    module: str
    base: str
    adapter: Callable[[], Any]


LIBRARIES: list[Library] = []  # filled by the package, because the adapters are in a higher layer


def settle_saving_(model: nn.Module, config: Any = None) -> None:
    """Attach or remove the quantizer of ``model``, and of models within it, to match their current weights.

    config: the config of the quantized weights, if known. Only the outermost model of a library within ``model`` gets a
    quantizer.
    """
    for library in LIBRARIES:
        base = getattr(sys.modules.get(library.module), library.base, None)
        for owner in () if base is None else list(_outermost(model, base)):
            quantized = any(isinstance(p, AffineQuantizedTensor) for p in owner.parameters())
            if quantized or getattr(owner, "hf_quantizer", None) is not None:
                _settle(owner, quantized, config, library)


def _settle(owner: nn.Module, quantized: bool, config: Any, library: Library) -> None:
    try:
        adapter = library.adapter()
    except ImportError as e:  # a release that the adapter does not support; the weights are quantized nevertheless
        warnings.warn(
            f"save_pretrained of {type(owner).__name__} cannot write its quantized weights, because this release of "
            f"{library.module.partition('.')[0]} is not supported ({e}); save it with pennyweight.save(model, folder)",
            stacklevel=4,
        )
        return
    adapter.settle_(owner, quantized, config)


def _outermost(model: nn.Module, base: type) -> Iterator[nn.Module]:
    if isinstance(model, base):
        yield model
        return
    for child in model.children():
        yield from _outermost(child, base)
