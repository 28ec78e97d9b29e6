"""A quantized weight as an op in a graph gets it: its plain tensors, and a key with all that is static.

Ops of the library ``pennyweight`` take (.., Tensor[] parts, .., str key). :func:`flatten` gives the parts,
:func:`key_of` the key, as JSON; :func:`parse_key` and :func:`weight_of` read them back.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.numerics import Parts
from ..core.spec import DTYPES, ActivationSpec, QuantSpec
from ..core.tensor import SLOTS, AffineQuantizedTensor, static_json

QT = AffineQuantizedTensor
LIBRARY = torch.library.Library("pennyweight", "DEF")


class Static(NamedTuple):
    """What a key holds."""

    tree: dict[str, Any]  # slot -> None for a plain tensor, or the tree of a nested quantized part
    spec: QuantSpec
    act: ActivationSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    kernel: str | None  # its name, if it was selected when the graph was made


def flatten(w: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Plain tensors of a weight, and the tree of slot names to rebuild it."""
    tensors: list[Tensor] = []
    tree: dict[str, Any] = {}
    for name, part in zip(SLOTS, w.parts, strict=True):
        if isinstance(part, QT):
            inner, tree[name] = flatten(part)
            tensors += inner
        elif part is not None:
            tensors.append(part)
            tree[name] = None
    return tensors, tree


def nest(tree: dict[str, Any], tensors: list[Tensor]) -> Parts:
    """The parts of a weight from its plain tensors; the inverse of :func:`flatten`. Empties the list."""
    parts: dict[str, Any] = {n: tensors.pop(0) if sub is None else nest(sub, tensors) for n, sub in tree.items()}
    return Parts(**parts)


def key_of(w: QT, kernel: str | None = None) -> str:
    """All static properties of a weight, and the kernel."""
    selected = {} if kernel is None else {"kernel": kernel}
    return json.dumps({**selected, "tree": flatten(w)[1], "weight": json.loads(static_json(w))})


@lru_cache(maxsize=65536)
def parse_key(key: str) -> Static:
    """What :func:`key_of` wrote."""
    data = json.loads(key)
    w = data["weight"]
    act = None if w["act"] is None else ActivationSpec.from_dict(w["act"])
    shape, dtype = tuple(w["shape"]), DTYPES[w["dtype"]]
    return Static(data["tree"], QuantSpec.from_dict(w["spec"]), act, shape, dtype, data.get("kernel"))


def weight_of(key: str, parts: list[Tensor]) -> QT:
    """The weight of an op."""
    static = parse_key(key)
    return QT(nest(static.tree, list(parts)), static.spec, static.shape, static.dtype, static.act)
