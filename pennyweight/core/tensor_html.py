"""A quantized tensor in a notebook: its scheme, size and scales, and a chart of its codes.

It is never dequantized, which may need gigabytes."""

from __future__ import annotations

from typing import Any

import torch

from ..support.html_table import html_columns, html_table
from .describe_spec import describe, describe_activation, shorten

LIMIT = 1 << 26  # elements; unpacking their codes takes as many bytes
COLUMNS = 32  # of the chart, at most


def tensor_html(w: Any) -> str:
    """HTML of an AffineQuantizedTensor. Without data, and above ``LIMIT`` elements, without scales and codes."""
    numel, plain = w.numel(), w.dtype.itemsize * w.numel()
    stored = f"{w.nbytes:,} bytes"
    if numel:
        stored += f", {8 * w.nbytes / numel:.3g} bits per weight, {plain / max(1, w.nbytes):.2f}x smaller"
    rows = [
        ["shape", "×".join(map(str, w.shape)) or "scalar"],
        ["represents", str(w.dtype).removeprefix("torch.")],
        ["device", str(w.device)],
        ["stored", stored],
        ["scheme", describe(w.spec)],
    ]
    rows += [] if w.act is None else [["inputs", describe_activation(w.act).removeprefix("inputs ")]]
    rows.append(["spec", str(w.spec)])
    chart = ""
    if 0 < numel <= LIMIT and not w.is_meta and type(w._codes) is torch.Tensor:
        with torch.no_grad():
            parts = w.plain_parts()
            rows += _scales(w)
            chart = _codes(parts.codes, int(w.spec.format.bits))
    return html_table((), rows, title=f"AffineQuantizedTensor: {shorten(w.spec, w.act)}") + chart


def _scales(w: Any) -> list[list[str]]:
    scale = w.scale
    if scale is None:
        return []
    values = (scale if type(scale) is torch.Tensor else scale.dequantize()).float()  # scales may be quantized too
    low, high, mean = float(values.min()), float(values.max()), float(values.mean())
    return [["scales", f"{values.numel():,}: from {low:.4g} to {high:.4g}, mean {mean:.4g}"]]


def _codes(codes: Any, bits: int) -> str:
    """A chart of how often each code occurs; of formats with many codes, neighbours share a column."""
    values, counts = torch.unique(codes.float(), return_counts=True)
    low, high = float(values[0]), float(values[-1])
    columns = min(COLUMNS, len(values))
    place = ((values.double() - low) / max(high - low, 1e-30) * (columns - 1)).round().long()
    shown = torch.zeros(columns, dtype=torch.int64, device=counts.device).scatter_add_(0, place, counts).tolist()
    label = f"codes from {low:g} to {high:g}: {len(values)} of {2**bits} occur"
    return f"{html_columns(shown, label)}<div><small>{label}</small></div>"
