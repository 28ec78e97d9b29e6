"""Frozen layers that are given the same input, computed in one call: q, k and v of attention, gate and up of an MLP.

For a few rows most of the time of a small layer is not spent on its weight: its input is quantized, threads are woken
and wait for each other. Siblings do that once. The first of them computes all; the others find their result, each with
the bits it would have computed. Names tell who may be siblings, the inputs they are seen to get tell whether they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.numerics import Parts
from ..kernels.table import case_of, select

NAMES = (  # in the order they are called
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"), ("w1", "w3"), ("q_lin", "k_lin", "v_lin"), ("wi_0", "wi_1"),
)  # fmt: skip
ROWS = 16  # beyond, the products themselves take the time


class Siblings:
    """Layers of one module that share their input.

    Until all of them were seen to get one and the same tensor, unchanged, one after the other, and after each time they
    were not, each computes for itself. Calls in several threads at once do not mix: a result belongs to its input.
    """

    def __init__(self, layers: tuple[Any, ...]) -> None:
        self.layers = layers

    def join(self) -> None:
        """Let the layers be siblings, if all of them are frozen."""
        self.same = False  # the last time they got the same input
        self._together: dict[torch.dtype, Callable[..., list[Tensor]] | None] = {}
        # Orders of their channels, with versions, and whether they are equal
        self._orders: tuple[list[tuple[Tensor, int]], bool] = ([], False)
        # Input, its version, and by layer what it may take: (weight, bias, result), or None while watching.
        self._held: tuple[Any, int, dict[int, Any]] | None = None
        if all(hasattr(layer, "_siblings") for layer in self.layers):
            for layer in self.layers:
                layer._siblings = self

    def part(self) -> None:
        """Let each compute for itself."""
        for layer in self.layers:
            layer.__dict__.pop("_siblings", None)

    def take(self, layer: Any, w: Any, bias: Tensor | None, x: Tensor) -> Tensor | None:
        """The result of a layer; None: compute it. x is plain and wants no gradient."""
        if layer is self.layers[0]:
            return self._lead(w, bias, x)
        held = self._held
        if held is None or held[0]() is not x or held[1] != x._version:
            self.same = False
            return None
        mine = held[2].pop(id(layer), None)
        if not held[2]:
            self.same, self._held = True, None
        if mine is None or mine[0] is not w or mine[1] is not bias:
            return None
        return mine[2]

    def _lead(self, w: Any, bias: Tensor | None, x: Tensor) -> Tensor | None:
        if self._held is not None:  # somebody did not come
            self.same, self._held = False, None
        # Whether an inference tensor was written to in between cannot be known.
        if x.numel() > ROWS * x.shape[-1] or x.is_inference():
            return None
        ref, version = weakref.ref(x), x._version
        if not self.same:
            self._held = ref, version, dict.fromkeys(map(id, self.layers[1:]))
            return None
        if x.dtype not in self._together:
            self._together[x.dtype] = self._bind(x.dtype)
        run = self._together[x.dtype]
        if run is None:
            return None
        weights, biases = [w], [bias]
        for layer in self.layers[1:]:
            weights.append(layer._renewed())
            biases.append(layer._parameters["bias"])
        parts = [w.parts for w in weights]
        if parts[0].perm is not None:
            if not self._one_order(parts):
                return None
            x = x.index_select(-1, parts[0].perm)
        ys = run(x, parts, biases)
        mine = zip(self.layers[1:], weights[1:], biases[1:], ys[1:], strict=True)
        self._held = ref, version, {id(layer): rest for layer, *rest in mine}
        return ys[0]

    def _one_order(self, parts: list[Parts]) -> bool:
        """Whether the channels of all weights lie in the same order. Compared once, and whenever one was changed."""
        perms: list[Tensor] = [p.perm for p in parts if p.perm is not None]
        if any(p.is_inference() for p in perms) or len(perms) < len(parts):
            return False
        seen, same = self._orders
        if len(seen) != len(perms) or any(a is not b or v != b._version for (a, v), b in zip(seen, perms, strict=True)):
            same = all(torch.equal(perms[0], p.to(perms[0].dtype)) for p in perms[1:])
            self._orders = [(p, p._version) for p in perms], same
        return same

    def _bind(self, dtype: torch.dtype) -> Callable[..., list[Tensor]] | None:
        cases = tuple(case_of(layer._plain.tensor, dtype) for layer in self.layers)
        kernels = {select("linear", case).name: select("linear", case) for case in cases}
        kernel = next(iter(kernels.values()))
        if len(kernels) > 1 or kernel.together is None or len({case.perm for case in cases}) > 1:
            return None
        return kernel.together(tuple(replace(case, perm=False) for case in cases))


def families(model: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """Children of one module whose names say that they share their input."""
    for module in model.modules():
        for names in NAMES:
            layers = [module._modules.get(name) for name in names]
            if all(layer is not None for layer in layers) and len(set(map(id, layers))) == len(layers):
                yield tuple(layer for layer in layers if layer is not None)
