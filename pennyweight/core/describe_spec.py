"""Specs in words: a short form for tables and ``print(model)``, and one with all that matters to a user; a quantized
tensor in a notebook."""

from __future__ import annotations

from typing import Any

import torch

from ..support.tables import html_columns, html_table
from .spec import SHORT, ActivationSpec, QuantSpec

# The field's names of formats that have another in the format table
_FLOATS = {"e4m3": "float8 e4m3", "e5m2": "float8 e5m2", "e3m2": "float6 e3m2", "e2m3": "float6 e2m3",
           "e2m1": "float4 e2m1"}  # fmt: skip
_MX = {"e4m3": "mxfp8", "e5m2": "mxfp8 e5m2", "e3m2": "mxfp6 e3m2", "e2m3": "mxfp6 e2m3", "e2m1": "mxfp4"}


def shorten(spec: QuantSpec, act: ActivationSpec | None = None, rank: int = 0) -> str:
    """Bits, granularity and activation: "int4, groups of 64", "int8 per row; inputs int8", "nf4, groups of 64".

    rank: axes of the weight, where they are known: blocks are those of its last axes.

    An integer format is named by its bits, as in the names of configs: whether its codes have a sign is a detail of how
    they are stored. :func:`describe` tells the rest.
    """
    text = _with_granularity(format_word(spec), spec, rank)
    if act is None:
        return text
    return f"{text}; inputs {format_word(act.spec)}" + (
        "" if act.mode == "dynamic" else f" {act.mode}{_asymmetric(act)}"
    )


def _with_granularity(name: str, spec: QuantSpec, rank: int) -> str:
    how = _granularity(spec, rank)
    return f"{name} {how}" if how.startswith("per ") else f"{name}, {how}"


def format_word(spec: QuantSpec) -> str:
    """The format alone: "int4", "nf4", "mxfp8"; integers by their bits."""
    name, scale = spec.format.name, spec.scale
    if spec.format.kind == "int":
        return name.removeprefix("u")
    nested = scale.format.name if isinstance(scale, QuantSpec) else ""
    if nested == "e8m0":
        return _MX.get(name, name)
    return "nvfp4" if (name, nested) == ("e2m1", "e4m3") else _FLOATS.get(name, name)


def describe(spec: QuantSpec, rank: int = 0) -> str:
    """A spec in words: "int4, groups of 64, symmetric, bf16 scales". rank: as for :func:`shorten`."""
    integer = spec.format.kind == "int"
    terms = [str(spec.format).removeprefix("u") if integer else str(spec.format), _granularity(spec, rank)]
    if integer:
        terms.append("asymmetric" if spec.zero_point or spec.offset is not None else "symmetric")
    if isinstance(spec.scale, QuantSpec):
        above = spec.scale.scale
        nested = "" if above is None else f" ({_granularity(spec.scale)}, {_short(above)} scales)"
        terms.append(f"{spec.scale.format} scales{nested}")
    elif spec.scale is not None:
        terms.append(f"{_short(spec.scale)} scales")
    return ", ".join(terms)


def describe_activation(act: ActivationSpec) -> str:
    """An activation in words: "inputs int8 per row, dynamic", "inputs int8 in groups of 128 columns, dynamic"; of a
    convolution "per sample", of a transposed one "per position"."""
    block, how = act.spec.block, _granularity(act.spec)
    if block is not None and len(block) == 1 and block[0] > 1:
        how = f"in groups of {block[0]} columns"
    elif block is not None and len(block) > 1 and block[0] == -1 and len(set(block[1:])) == 1:
        how = {-1: "per sample", 1: "per position"}.get(block[1], how)
    return f"inputs {act.spec.format} {how}, {act.mode}{_asymmetric(act)}"


def _asymmetric(act: ActivationSpec) -> str:
    """Of a static activation, because calibration chooses it layer by layer."""
    return ", asymmetric" if act.mode == "static" and act.spec.zero_point else ""


def _granularity(spec: QuantSpec, rank: int = 0) -> str:
    block = spec.block
    if block is None or (set(block) == {-1} and len(block) == rank > 1):
        return "per tensor"
    if set(block) == {-1} and rank > len(block) + 1 > 2:  # of each input and output channel
        return "per kernel"
    last, others = block[-1], set(block[:-1])
    if others <= {1}:
        return "per row" if last == -1 else "per element" if last == 1 else f"groups of {last}"
    if block[0] > 1 and set(block[1:]) == {1}:  # of a transposed convolution
        return f"groups of {block[0]}"
    kernels, rest = block[0], set(block[2:] if len(block) > 2 and block[1] == 1 else block[1:])
    if rest == {-1}:  # whole kernels, as convolutions have them
        return "per output channel" if kernels == -1 else f"groups of {kernels} input channels"
    return f"blocks of {'×'.join('all' if size == -1 else str(size) for size in block)}"


def _short(kind: Any) -> str:
    return str(kind.format) if isinstance(kind, QuantSpec) else SHORT[kind]


# -- notebooks ---------------------------------------------------------------------------------------------------------

LIMIT = 1 << 26  # elements; unpacking their codes takes as many bytes
COLUMNS = 32  # of the chart, at most


def tensor_html(w: Any) -> str:
    """HTML of an AffineQuantizedTensor: its scheme, size and scales, and a chart of its codes. Without data, and above
    ``LIMIT`` elements, without scales and codes. It is never dequantized, which may need gigabytes."""
    numel, plain = w.numel(), w.dtype.itemsize * w.numel()
    stored = f"{w.nbytes:,} bytes"
    if numel:
        stored += f", {8 * w.nbytes / numel:.3g} bits per weight, {plain / max(1, w.nbytes):.2f}x smaller"
    rows = [
        ["shape", "×".join(map(str, w.shape)) or "scalar"],
        ["represents", str(w.dtype).removeprefix("torch.")],
        ["device", str(w.device)],
        ["stored", stored],
        ["scheme", describe(w.spec, w.ndim)],
    ]
    rows += [] if w.act is None else [["inputs", describe_activation(w.act).removeprefix("inputs ")]]
    rows.append(["spec", str(w.spec)])
    chart = ""
    if 0 < numel <= LIMIT and not w.is_meta and type(w._codes) is torch.Tensor:
        with torch.no_grad():
            parts = w.plain_parts()
            rows += _scales(w)
            chart = _codes(parts.codes, int(w.spec.format.bits))
    return html_table((), rows, title=f"AffineQuantizedTensor: {shorten(w.spec, w.act, w.ndim)}") + chart


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
