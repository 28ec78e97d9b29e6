"""Checks of fused blocks and nets at run time: each call runs both ways and the results are compared.

On with the environment variable ``PENNYWEIGHT_CHECK=1``, or within :func:`checked`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ..support import environment
from .verify_block import difference, tolerance

_CHECK: ContextVar[bool] = ContextVar("pennyweight_check", default=environment.CHECK.read() == "1")


class CheckError(RuntimeError):
    """A fused block or net and its own forward gave different results."""


def enabled() -> bool:
    return _CHECK.get()


@contextmanager
def checked(enabled: bool = True) -> Iterator[None]:
    """Within this context every call of a fused block or net also runs its own forward and compares the outputs, and
    the keys and values in the cache. Raises :class:`CheckError` if they differ by more than the tolerance."""
    token = _CHECK.set(enabled)
    try:
        yield
    finally:
        _CHECK.reset(token)


def run(fused: Callable[..., Any], block: Any, args: Any, kwargs: Any) -> Any:
    """fused(block, its class, args, kwargs), compared with the block's own forward on copies of the cache."""
    cls = type(block)
    description = cls.description
    names = description.arguments.names
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    before = {n: copy.deepcopy(v) for n, v in given.items() if n == description.arguments.cache and v is not None}
    own = {**given, **before}
    y = fused(block, cls, args, kwargs)
    if type(y) is str:
        return y
    want = cls.thawed.forward(block, **own)
    limit = tolerance(description, block)
    found, expected, x = (t[0] if isinstance(t, tuple) else t for t in (y, want, given[description.arguments.hidden]))
    compare(f"{description.name}: the output", difference(found, expected, x), limit)
    for name, cache in before.items():
        for what, new, old in _states(given[name], cache, description.layer):
            compare(f"{description.name}: {what} in the cache", difference(new, old, old * 0), limit)
    return y


def compare(what: str, error: float, limit: float, kind: str = "block") -> None:
    """Raise :class:`CheckError` if an error is above its limit."""
    if not error <= limit:  # also NaN
        raise CheckError(
            f"{what} of the fused {kind} differs from that of its own forward by {error:.1e} (mean |difference| / mean "
            f"|{'change' if kind == 'block' else 'output'}|), the limit is {limit:.0e}; call "
            "pennyweight.inference.thaw_(model) and report this"
        )


def _states(cache: Any, other: Any, layer: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Keys and values of a layer in two caches."""
    both = [getattr(c, "self_attention_cache", c).layers[layer] for c in (cache, other)]
    for name in ("keys", "values"):
        new, old = (getattr(found, name, None) for found in both)
        if isinstance(new, Tensor) and isinstance(old, Tensor) and old.numel():
            if new.shape != old.shape:
                raise CheckError(f"{name} in the cache have shape {list(new.shape)}, expected {list(old.shape)}")
            yield name, new, old
