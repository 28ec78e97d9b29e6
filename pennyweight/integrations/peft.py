"""PEFT: what merging an adapter into quantized weights costs, and merging that can be undone exactly.

Adapters need nothing of this file to train, be saved, loaded and merged: our weights pass gradients on, and PEFT's
``weight.data += delta`` rounds the sum into them again. That rounding is an error of its own, which PEFT says nothing
about; and its ``unmerge`` subtracts and rounds once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.numerics import sqnr
from ..core.tensor import AffineQuantizedTensor
from ..quantize.configs import AOBaseConfig
from ..quantize.pipeline import quantize_
from ..quantize.report import Report, Row


def merge_and_report(
    model: Any, adapter_names: list[str] | None = None, config: AOBaseConfig | None = None
) -> tuple[Any, Report]:
    """``model.merge_and_unload()`` of a PEFT model, and a report with one row for each quantized weight.

    config  what the merged weights become, from the exact sum of base weight and adapter: int8 takes in what NF4 rounds
            off. Default: each stays what it was

    A row's ``sqnr`` is that of the merged weight against the exact sum; its note says how well the adapter's own change
    survived: 0 dB and less means that rounding ate it. ``report.check(min_sqnr=...)`` gates on it. Raises ValueError
    where there are no adapters, and where they are merged already.
    """
    before: dict[int, tuple[Any, Tensor]] = {}  # base layer -> itself, and the weight that it had
    if config is None:
        report, _ = _merge(model, adapter_names)
    else:
        for _, layer in _unmerged(model):
            base = layer.get_base_layer()
            if isinstance(getattr(base, "weight", None), AffineQuantizedTensor):
                before[id(base)] = base, base.weight.detach()
                _put(layer, nn.Parameter(base.weight.dequantize(torch.float32), requires_grad=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")  # as they are, by the line above
        model = model.merge_and_unload(adapter_names=adapter_names)
    if config is not None:
        exact = {key: base.weight.detach() for key, (base, _) in before.items()}
        for base, was in before.values():  # as the model computes, so that the config sees what it would have seen
            base.weight.data = base.weight.data.to(was.dtype)
        report = quantize_(model, config, lambda module, name: id(module) in before)
        for row in report.quantized:
            base, was = before[id(model.get_submodule(row.name.rpartition(".")[0]))]
            start, now = was.dequantize(torch.float32), base.weight.dequantize(torch.float32)
            row.sqnr, row.note = sqnr(exact[id(base)], now), _kept(exact[id(base)] - start, now - start)
    return model, report


def _kept(change: Tensor, rounded: Tensor) -> str:
    return f"change kept at {sqnr(change, rounded):.1f} dB"


@contextmanager
def merged(model: Any, adapter_names: list[str] | None = None) -> Iterator[Report]:
    """Within: adapters are merged, as for serving. After it the base weights are what they were, bit for bit.

    Gives the report of :func:`merge_and_report`. Keeps the base weights of the adapted layers beside the merged ones.
    """
    report, before = _merge(model, adapter_names)
    try:
        yield report
    finally:
        for layer, weight in before:
            _put(layer, weight)
            layer.merged_adapters.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already unmerged")  # the quantized layers, by the line above
            model.unmerge_adapter()


def _unmerged(model: Any) -> list[tuple[str, Any]]:
    """The layers with adapters, by name. Raises ValueError where one is merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    if not layers or not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"{type(model).__name__} has no adapters to merge: no layer of it is PEFT's; pass what get_peft_model() or "
            "PeftModel.from_pretrained() returned, before merge_and_unload()"
        )
    for name, layer in layers:
        if layer.merged:
            raise ValueError(f"{name} has {layer.merged_adapters} merged already; unmerge_adapter() first")
    return layers


def _merge(model: Any, adapter_names: list[str] | None) -> tuple[Report, list[tuple[Any, Tensor]]]:
    """Merge all; (report, the quantized base weights that were)."""
    rows, before = [], []
    with torch.no_grad():
        for name, layer in _unmerged(model):
            weight = getattr(layer.get_base_layer(), "weight", None)
            if not isinstance(weight, AffineQuantizedTensor):
                layer.merge(adapter_names=adapter_names)
                continue
            row = _merge_layer(name, layer, weight, adapter_names)
            if row is not None:
                rows.append(row)
                before.append((layer, weight))
    return Report("merge", rows, verb="merged"), before


def _merge_layer(name: str, layer: Any, weight: AffineQuantizedTensor, adapter_names: list[str] | None) -> Row | None:
    """Let PEFT merge into the exact value of the weight, then round that. None where no adapter is meant."""
    start = weight.dequantize(torch.float32)
    _put(layer, nn.Parameter(start.clone(), requires_grad=False))
    try:
        layer.merge(adapter_names=adapter_names)
        exact = layer.get_base_layer().weight.detach()
    finally:
        _put(layer, weight)
    if not layer.merged:
        return None
    new: Any = weight.detach().clone()
    new.add_(exact - start)
    _put(layer, nn.Parameter(new, requires_grad=weight.requires_grad))
    rounded = new.dequantize(torch.float32)
    base = type(layer.get_base_layer()).__name__
    scheme, sizes = str(weight.spec.with_(layout="plain")), (weight.nbytes, new.nbytes)
    note = f"{', '.join(layer.merged_adapters)}: {_kept(exact - start, rounded - start)}"
    return Row(name, base, tuple(weight.shape), scheme, "-", *sizes, sqnr(exact, rounded), note)


def _put(layer: Any, weight: Tensor) -> None:
    """Not by assignment: an optimizer's or a hook's idea of the module's parameters is not asked."""
    base = layer.get_base_layer()
    if "weight" in base._parameters:
        base._parameters["weight"] = weight
    else:
        base.weight = weight
