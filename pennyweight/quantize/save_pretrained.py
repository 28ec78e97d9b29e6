"""Models that save themselves, by ``save_pretrained``: their library is told how, once they hold quantized weights.

These libraries ask an object on the model, its quantizer, what to write. ``from_pretrained`` puts it there; for a model
that is quantized in place somebody has to. Adapters live on a floor above, so they are named here and imported when a
model of their library comes by; a library that nobody imported is not imported.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from ..core.tensor import AffineQuantizedTensor


class Library(NamedTuple):
    """A library whose models save themselves.

    module, base  where its class of models is defined, and its name
    adapter       module of ours with ``settle_(model, quantized, config)``
    """

    module: str
    base: str
    adapter: str


LIBRARIES = (
    Library("transformers.modeling_utils", "PreTrainedModel", "pennyweight.integrations.transformers_saving"),
    Library("diffusers.models.modeling_utils", "ModelMixin", "pennyweight.integrations.diffusers"),
)


def settle_saving_(model: nn.Module, config: Any = None) -> None:
    """Make ``save_pretrained`` of ``model``, and of models within it, fit the weights that they hold now.

    config: by which they were quantized, where that is known. Only the outermost model of a library within ``model``
    gets its quantizer: what holds a part of it cannot be found from there.
    """
    for library in LIBRARIES:
        base = getattr(sys.modules.get(library.module), library.base, None)
        for owner in () if base is None else list(_outermost(model, base)):
            quantized = any(isinstance(p, AffineQuantizedTensor) for p in owner.parameters())
            if quantized or getattr(owner, "hf_quantizer", None) is not None:
                _settle(owner, quantized, config, library)


def _settle(owner: nn.Module, quantized: bool, config: Any, library: Library) -> None:
    try:
        adapter = import_module(library.adapter)
    except ImportError as e:  # a release that the adapter does not know; the weights are quantized all the same
        warnings.warn(
            f"save_pretrained of {type(owner).__name__} will not be able to write its quantized weights, because "
            f"{library.adapter} does not fit this release of {library.module.partition('.')[0]} ({e}); save it with "
            "pennyweight.save(model, folder)",
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
