"""Where a layer's error comes from if its inputs are quantized too: from the weight or from the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ..core.tensor import AffineQuantizedTensor
from ..planning.run_batch import run_batch
from .layers import Pair, first_tensor, pairs, same_shape, unwrapped
from .metrics import decibels, energies
from .outputs import batches_of, counting, evaluating


@dataclass
class Source:
    """Sums over one layer's outputs, both with the float model's input x.

    signal   |W x|^2;  weight: |Wq x - W x|^2, the weight alone;  inputs: |layer(x) - Wq x|^2, of the quantization of x
    """

    name: str
    signal: float = 0.0
    weight: float = 0.0
    inputs: float = 0.0

    @property
    def weight_sqnr(self) -> float:
        """SQNR in dB if only the weight is quantized."""
        return decibels(self.signal, self.weight)

    @property
    def inputs_sqnr(self) -> float:
        """SQNR in dB if only the inputs are quantized."""
        return decibels(self.signal, self.inputs)

    @property
    def share(self) -> float:
        """Of the inputs: inputs / (weight + inputs); 0 without error."""
        total = self.weight + self.inputs
        return self.inputs / total if total > 0 else 0.0


def error_sources(exact: nn.Module, found: nn.Module, batches: Any) -> dict[str, Source]:
    """Sources of the error of each layer whose inputs are quantized, by the name of its weight; {} without such layers
    (then all error comes from the weights). One run of the float model."""
    exact, found = unwrapped(exact), unwrapped(found)
    some = [p for p in pairs(exact, found)[0] if getattr(p.found.get(), "act", None) is not None]
    out: dict[str, Source] = {}
    state: dict[str, Any] = {"busy": False, "batch": None}
    handles = [p.exact.module.register_forward_hook(partial(_add, out, state, p), with_kwargs=True) for p in some]
    try:
        with evaluating(exact, found):
            for batch in batches_of(batches) if some else ():
                state["batch"] = batch
                run_batch(exact, batch)
    finally:
        for handle in handles:
            handle.remove()
    return out


def _add(
    out: dict[str, Source], state: dict[str, Any], pair: Pair, module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    y = first_tensor(output)
    if y is None or state["busy"]:  # busy: this hook is calling the layer
        return
    w = pair.found.get()
    assert isinstance(w, AffineQuantizedTensor)
    rounded = w.dequantize().to(pair.exact.get().device, pair.exact.get().dtype)
    state["busy"] = True
    try:
        weight_only = first_tensor(functional_call(module, {pair.exact.param: rounded}, args, kwargs))
        whole = first_tensor(pair.found.module(*same_shape(w, args), **same_shape(w, kwargs)))
    finally:
        state["busy"] = False
    if weight_only is None or whole is None or not y.shape == weight_only.shape == whole.shape:
        return
    y, weight_only, whole = (counting(state["batch"], t.to(torch.float32)) for t in (y, weight_only, whole))
    here = out.setdefault(pair.name, Source(pair.name))
    signal, noise = energies(y, weight_only)
    here.signal, here.weight = here.signal + signal, here.weight + noise
    here.inputs += energies(weight_only, whole)[1]
