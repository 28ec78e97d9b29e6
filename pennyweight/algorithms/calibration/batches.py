"""Reads calibration data: every batch is checked once here, before any algorithm runs on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import KeyEntry, MappingKey, SequenceKey, tree_flatten_with_path

from ...distributed import all_reduce
from ...quantize.config_resolution import PlanError


class Batches(list[Any]):
    """Checked batches; :func:`read` does not check them again."""


def read(batches: Any, what: str = "calibration", *, together: bool = False) -> Batches:
    """The batches as a list. Raises PlanError for a single batch, and for a batch with NaN or infinite values (names
    its index).

    what        the argument's name, for messages
    together    every rank of torch.distributed calls this; all raise if the data of one rank is invalid

    -inf is allowed in masks: in arguments whose name has "mask" or "bias", and in positional ones after the first.
    """
    if isinstance(batches, Batches):
        return batches
    why = ""
    found = Batches()
    try:
        found.extend(each(batches, what))
    except PlanError as error:
        why = str(error)
    if together and all_reduce.is_distributed():
        said = [f"rank {i}: {text}" for i, text in enumerate(all_reduce.gather_objects(why)) if text]
        why = "; ".join(said)
    if why:
        raise PlanError(why)
    return found


def each(batches: Any, what: str = "calibration") -> Iterator[Any]:
    """Iterate over the batches with the checks of :func:`read`: for data that is read once and not stored."""
    if isinstance(batches, (Tensor, Mapping, str)):
        raise PlanError(f"{what} must be a list of batches, got one {type(batches).__name__}; pass {what}=[batch]")
    if isinstance(batches, Batches):
        yield from batches
        return
    for i, batch in enumerate(batches):
        _check(batch, f"{what} batch {i}")
        yield batch


def _check(batch: Any, name: str) -> None:
    found, _ = tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    for path, x in found:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()) or x.is_meta:
            continue
        if bool(x.isfinite().all()):
            continue
        nan, inf = int(x.isnan().sum()), int(x.isinf().sum())
        if _may_mask(path) and not nan and not bool(x.isposinf().any()):
            continue
        where = "".join(map(str, path))
        raise PlanError(
            f"{name}{where} {tuple(x.shape)} has {nan} NaN and {inf} infinite values of {x.numel()}; "
            "remove the batch or fix the data"
        )


def _may_mask(path: tuple[KeyEntry, ...]) -> bool:
    """Whether an argument may be an additive mask, where -inf is valid."""
    first = path[0] if path else None
    if isinstance(first, MappingKey):
        return any(word in str(first.key) for word in ("mask", "bias"))
    return isinstance(first, SequenceKey) and first.idx > 0


def rows_of(batch: Any) -> int:
    """Number of samples of a batch: the first dimension if all its tensors share it, else 1."""
    leaves = [x for _, x in tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)[0]]
    counts = {x.shape[0] if isinstance(x, Tensor) and x.ndim else 0 for x in leaves}
    return counts.pop() if len(counts) == 1 and min(counts) > 0 else 1


def part(batch: Any, rows: list[int]) -> Any:
    """The samples of a batch with these indices."""
    if isinstance(batch, Mapping):
        return {name: x[rows] for name, x in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(x[rows] for x in batch)
    return batch[torch.tensor(rows, device="cpu")]


def held_out(batches: Batches, share: float) -> tuple[Batches, Batches]:
    """(training part, held-out part): one in every 1 / share batches is held out, or rows of a single batch. The second
    is empty for a single row, or if ``share`` is 0."""
    if share <= 0 or not batches:
        return batches, Batches()
    if len(batches) == 1:
        batch, n = batches[0], rows_of(batches[0])
        if n < 2:
            return batches, Batches()
        aside = _aside(n, share)
        rest = [i for i in range(n) if i not in aside]
        return Batches([part(batch, rest)]), Batches([part(batch, sorted(aside))])
    aside = _aside(len(batches), share)
    rest = [b for i, b in enumerate(batches) if i not in aside]
    return Batches(rest), Batches([batches[i] for i in sorted(aside)])


def _aside(n: int, share: float) -> set[int]:
    """Held-out indices of n: at least one and not all; evenly spread, because data is often sorted by length."""
    count = min(max(1, round(share * n)), n - 1)
    return {(2 * i + 1) * n // (2 * count) for i in range(count)}
