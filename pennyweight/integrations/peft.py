"""PEFT: measures the error of merging an adapter into quantized weights, and merges that can be undone exactly.

Training, saving, loading and merging adapters works without this module: quantized weights pass gradients on, and
PEFT's ``weight.data += delta`` requantizes the sum. PEFT does not report the error of that rounding, and its
``unmerge`` subtracts and rounds once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.model_arguments import check_arguments
from ..core.numerics import sqnr
from ..core.tensor import AffineQuantizedTensor
from ..planning.configs import AOBaseConfig
from ..planning.quantize_report import Report, Row
from ..quantize.pipeline import quantize_


@check_arguments()
def merge_and_report(
    model: Any, adapter_names: list[str] | None = None, config: AOBaseConfig | None = None
) -> tuple[Any, Report]:
    """``model.merge_and_unload()`` of a PEFT model, and a report with one row for each quantized weight.

    config  config for the merged weights, applied to the exact sum of base weight and adapter: int8 preserves changes
            that NF4 rounds off. Default: each keeps its format

    A row's ``sqnr`` is that of the merged weight against the exact sum; its note gives the SQNR of the adapter's
    change: at 0 dB or less, rounding destroyed it. ``report.check(min_sqnr=...)`` checks it. Raises ValueError if there
    are no adapters, or if they are already merged.
    """
    before: dict[int, tuple[Any, Tensor]] = {}  # id -> base layer and its original weight
    if config is None:
        report, _ = _merge(model, adapter_names)
    else:
        for _, layer in _unmerged(model):
            base = layer.get_base_layer()
            if isinstance(getattr(base, "weight", None), AffineQuantizedTensor):
                before[id(base)] = base, base.weight.detach()
                _put(layer, nn.Parameter(base.weight.dequantize(torch.float32), requires_grad=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All adapters are already merged")  # merged by the line above
        model = model.merge_and_unload(adapter_names=adapter_names)
    if config is not None:
        exact = {key: base.weight.detach() for key, (base, _) in before.items()}
        for base, was in before.values():  # in the compute dtype, as the config would see it
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
    """Context manager: adapters are merged inside, as for serving. On exit the base weights are restored bit for bit.

    Yields the report of :func:`merge_and_report`. Keeps the base weights of the adapted layers in memory.
    """
    report, before = _merge(model, adapter_names)
    try:
        yield report
    finally:
        for layer, weight in before:
            _put(layer, weight)
            layer.merged_adapters.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already unmerged")  # unmerged by the line above
            model.unmerge_adapter()


def _unmerged(model: Any) -> list[tuple[str, Any]]:
    """The layers with adapters, by name. Raises ValueError if one is merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    if not layers or not hasattr(model, "merge_and_unload"):
        raise ValueError(
            f"{type(model).__name__} has no adapters to merge (no PEFT layers); pass the result of get_peft_model() or "
            "PeftModel.from_pretrained(), before merge_and_unload()"
        )
    for name, layer in layers:
        if layer.merged:
            raise ValueError(f"{name} has {layer.merged_adapters} already merged; call unmerge_adapter() first")
    return layers


def _merge(model: Any, adapter_names: list[str] | None) -> tuple[Report, list[tuple[Any, Tensor]]]:
    """Merge all; (report, the original quantized base weights)."""
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
    """Let PEFT merge into the dequantized weight, then requantize it. None if no adapter applies."""
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
    """Not an assignment: bypasses optimizers and hooks that watch the module's parameters."""
    base = layer.get_base_layer()
    if "weight" in base._parameters:
        base._parameters["weight"] = weight
    else:
        base.weight = weight
