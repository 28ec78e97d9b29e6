"""Copies and quantizes from file to file with one tensor, or a few of its rows, in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..algorithms.solve import solve_weight
from ..core.numerics import sqnr
from ..planning.plan import PlanRow
from ..planning.scheme import Scheme
from .file import CheckpointError
from .manifest import Meta, clean, stored_parts
from .safetensors_file import File
from .state_dict import Item, pack

COPY_BYTES = 8 << 20
ROWS_NUMEL = 1 << 22  # elements quantized at a time: 16 MiB as float32, quantizing needs about ten such buffers


@dataclass
class QuantizationNoise:
    """Signal and noise of the tensors quantized so far, by name; and how many numbers of a requantized one changed by
    more than a scale rounded to 16 bits changes them."""

    signal: dict[str, float]
    noise: dict[str, float]
    changed: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, x: Tensor, sqnr: float) -> None:
        signal = float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2
        self.signal[name] = self.signal.get(name, 0.0) + signal
        self.noise[name] = self.noise.get(name, 0.0) + (0.0 if math.isinf(sqnr) else signal / 10 ** (sqnr / 10))

    def add_sums(self, name: str, signal: float, noise: float) -> None:
        """Sums of x**2 and of (value - x)**2."""
        self.signal[name] = self.signal.get(name, 0.0) + signal
        self.noise[name] = self.noise.get(name, 0.0) + noise

    def compare(self, name: str, x: Tensor, new: Tensor) -> None:
        """Add the noise of ``new``, and count its numbers that changed."""
        self.add(name, x, sqnr(x, new))
        moved = int(((new - x).abs() > x.abs() * 2**-8).sum())
        self.changed[name] = self.changed.get(name, 0) + moved

    def sqnr(self, name: str) -> float:
        signal, noise = self.signal[name], self.noise[name]
        return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def copy_rows(file: File, name: str, aliases: tuple[str, ...]) -> Item:
    """A tensor that is copied unchanged."""
    e = file.entries[name]
    step = COPY_BYTES // e.dtype.itemsize

    def make() -> Iterator[tuple[str, int, Tensor]]:
        for start in range(0, max(e.numel, 1), step):
            piece = file.read(name, start, min(start + step, e.numel))
            yield name, start, piece.reshape(e.shape) if piece.numel() == e.numel else piece

    return Item(name, {name: (e.dtype, e.shape)}, make, None, aliases)


def quantize_rows(file: File, name: str, row: PlanRow, aliases: tuple[str, ...], noise: QuantizationNoise) -> Item:
    """A tensor that a plan's row quantizes. Making it raises CheckpointError if it contains NaN or inf."""
    assert row.scheme is not None
    assert row.site is not None
    scheme, op, e, rank = row.scheme, row.site.op, file.entries[name], len(file.entries[name].shape)
    axes = (*range(rank - 2), rank - 1, rank - 2) if row.site.transposed else None
    act = None if scheme.act is None else replace(scheme.act, spec=clean(scheme.act.spec))
    meta = Meta(clean(scheme.weight), e.shape, e.dtype, act, axes).for_writing()

    def make() -> Iterable[tuple[str, int, Tensor]]:
        by_rows = rank > 1 and axes is None and meta.spec.rows_independent(meta.shape)
        return (_by_rows if by_rows else _whole)(file, name, scheme, meta, noise, op)

    return Item(name, stored_parts(name, meta), make, meta, aliases)


def _by_rows(
    file: File, name: str, scheme: Scheme, meta: Meta, noise: QuantizationNoise, op: str
) -> Iterator[tuple[str, int, Tensor]]:
    rows = meta.shape[0]
    width = math.prod(meta.shape[1:])
    step = max(1, ROWS_NUMEL // width)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        x = file.read(name, start * width, stop * width).reshape(stop - start, *meta.shape[1:])
        for part, tensor in _quantize(file, name, x, scheme, replace(meta, shape=tuple(x.shape)), noise, op).items():
            if not part.startswith(f"{name}.act_") and part != name:
                yield part, start * (tensor.numel() // tensor.shape[0]), tensor
            elif start == 0:
                yield part, 0, tensor


def _whole(
    file: File, name: str, scheme: Scheme, meta: Meta, noise: QuantizationNoise, op: str
) -> list[tuple[str, int, Tensor]]:
    e = file.entries[name]
    x = file.read(name, 0, e.numel).reshape(e.shape)
    return [(part, 0, tensor) for part, tensor in _quantize(file, name, x, scheme, meta, noise, op).items()]


def _quantize(
    file: File, name: str, x: Tensor, scheme: Scheme, meta: Meta, noise: QuantizationNoise, op: str
) -> dict[str, Tensor]:
    """Stored tensors of x. x: in the file's axis order; the contracted axis is last after ``meta.axes``."""
    try:
        solved = solve_weight(x if meta.axes is None else x.transpose(-2, -1), scheme, name, op=op)
        w = solved.weight
        noise.add(name, x, solved.sqnr)
        return pack(name, w if meta.axes is None else w.transpose(-2, -1), meta)  # type: ignore[arg-type]
    except CheckpointError as e:
        raise CheckpointError(file.path, e.tensor, e.reason) from e
    except ValueError as e:
        raise CheckpointError(file.path, name, str(e).removeprefix(f"{name}: ")) from e
