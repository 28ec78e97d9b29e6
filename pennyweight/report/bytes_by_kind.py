"""Bytes of a model by kind of layer: embeddings, attention, MLP, convolutions, head, norms, other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ..planning.layer_kinds import KINDS, kind_of_layer
from .layers import stored_bytes, unwrapped


@dataclass(frozen=True)
class KindBytes:
    """Stored bytes of the layers of one kind, float (None: unknown) and quantized, and how many of their elements are
    quantized."""

    kind: str
    bytes_float: int | None
    bytes: int
    elements: int
    quantized: int


def model_kinds(quantized: nn.Module, exact: nn.Module | None = None) -> list[KindBytes]:
    """Bytes by kind of a model's state dict, tied weights once; kinds without bytes are left out. The sum is that of
    :func:`pennyweight.report.layers.model_bytes`."""
    before = None if exact is None else {k: size for k, size, _, _ in _sums(_entries(exact))}
    after = {k: (size, n, q) for k, size, n, q in _sums(_entries(quantized))}
    out = []
    for kind in KINDS:
        size, n, q = after.get(kind, (0, 0, 0))
        old = None if before is None else before.get(kind, 0)
        if size or old:
            out.append(KindBytes(kind, old, size, n, q))
    return out


def stored_kinds(entries: Iterable[tuple[str, int, int, int, bool]]) -> list[KindBytes]:
    """Bytes by kind from a checkpoint's headers: (name, axes, bytes, elements, whether it is quantized)."""
    some = (
        (kind_of_layer(name, "", rank), size, n, n if quantized else 0) for name, rank, size, n, quantized in entries
    )
    sums = {k: (size, n, q) for k, size, n, q in _sums(some)}
    return [KindBytes(kind, None, *sums[kind]) for kind in KINDS if kind in sums]


def _entries(model: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """(kind, bytes, elements, quantized elements) of each parameter and persistent buffer."""
    seen: set[int] = set()
    for prefix, module in unwrapped(model).named_modules():
        lasting = module._buffers.keys() - module._non_persistent_buffers_set
        tensors: dict[str, Tensor | None] = {**module._parameters, **{n: module._buffers[n] for n in lasting}}
        for name, tensor in tensors.items():
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            full = f"{prefix}.{name}" if prefix else name
            kind = kind_of_layer(full, type(module).__name__, tensor.ndim)
            quantized = hasattr(tensor, "spec")
            yield kind, stored_bytes(tensor), tensor.numel(), tensor.numel() if quantized else 0


def _sums(entries: Iterable[tuple[str, int, int, int]]) -> list[tuple[str, int, int, int]]:
    found: dict[str, list[int]] = {}
    for kind, *numbers in entries:
        here = found.setdefault(kind, [0, 0, 0])
        for i, n in enumerate(numbers):
            here[i] += n
    return [(kind, *numbers) for kind, numbers in found.items()]  # type: ignore[misc]
