"""Runs a fused block beside the block's own forward and compares the outputs: when it is fused, and on request at each
call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..support import environment
from ..support.errors import Refusal
from .block_description import BlockDescription
from .bound_block import Bound, Reference
from .examples import Observed, Random, zeros

# Limits of mean |difference| / mean |y - x|, for the block's contribution y - x to its input x. Measured over the
# families in tests/inference: float32 1e-6, bfloat16 8e-3 (the unfused block rounds between its operations), float16
# 5e-4, and 3e-2 if inputs are quantized: a rounding difference moves some codes by one.
FLOAT32, BFLOAT16, FLOAT16, QUANTIZED_INPUTS = 1e-4, 2e-2, 4e-3, 5e-2
SHAPES = ((2, 5), (1, 1), (3, 4))
STATES = 7  # tokens of cross-attention


def tolerance(description: BlockDescription, block: nn.Module) -> float:
    """The limit of :func:`difference` for a block."""
    weights: list[Any] = [dict(block.named_parameters()).get(product[0]) for product in description.products()]
    quantized = any(isinstance(w, AffineQuantizedTensor) and w.act is not None for w in weights)
    limits = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
    return max(limits[description.dtype], QUANTIZED_INPUTS if quantized else 0.0)


def difference(y: Tensor, expected: Tensor, x: Tensor) -> float:
    """mean |y - expected| without the rounding of y to its dtype, eps / 2 * |y|, relative to mean |expected - x|."""
    rounding = torch.finfo(y.dtype).eps / 2
    y, expected, x = y.float(), expected.float(), x.float()
    error = float((y - expected).abs().mean()) - rounding * float(expected.abs().mean())
    return max(0.0, error) / max(float((expected - x).abs().mean()), 1e-30)


def verify(block: nn.Module, bound: Bound, observed: Observed) -> None:
    """Compare both for random inputs, masks, rotations and caches. Raises Refusal if they differ.

    A block in half precision is first compared in float32, with the reference, where rounding hides nothing.
    """
    if bound.description.dtype is not torch.float32:
        twin, description = copy.deepcopy(block).float(), replace(bound.description, dtype=torch.float32)
        verify(twin, Bound(twin, description, Reference), observed)
    limit, hidden = tolerance(bound.description, block), bound.description.arguments.hidden
    with torch.no_grad():
        for case, calls in _cases(bound.description, observed):
            for kwargs in calls:
                given, expected = _twin(bound.description, kwargs)
                y = _fused(case, bound, given)  # first: a block may write into its inputs
                _compare(case, y, type(block).forward(block, **expected), kwargs[hidden], limit)


def verify_observed(block: nn.Module, bound: Bound, observed: Observed) -> None:
    """Compare with what the block returned in the model's run, for a block that is built like one that :func:`verify`
    compared: values of tensors and the index in a cache are new. Raises Refusal if they differ.

    The block's own forward, most of the time of a comparison, is not run again.
    """
    a, case = bound.description.arguments, "the example"
    given = dict(observed.arguments)
    if a.cache:  # the observed one has this call's keys already
        makers = _caches(bool(a.states))
        given[a.cache] = makers[0]() if makers else None
    with torch.no_grad():
        y = _fused(case, bound, given)
        _compare(case, y, observed.output, given[a.hidden], tolerance(bound.description, block))


def _fused(case: str, bound: Bound, given: dict[str, Any]) -> Any:
    y = bound.run((), given)
    if isinstance(y, str):
        raise Refusal(f"{case}: {y}")
    return y


def _compare(case: str, y: Any, want: Any, x: Tensor, limit: float) -> None:
    y, want = (t[0] if isinstance(t, tuple) else t for t in (y, want))
    found = difference(y, want, x)
    if not found <= limit:  # also NaN
        raise Refusal(f"{case}: its output differs by {found:.1e}, the limit is {limit:.0e}")


def _twin(description: BlockDescription, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for both runs: a pair of caches is split."""
    name = description.arguments.cache
    if not name or kwargs.get(name) is None:
        return kwargs, kwargs
    return {**kwargs, name: kwargs[name][0]}, {**kwargs, name: kwargs[name][1]}


def _cases(
    description: BlockDescription, observed: Observed, shapes: Sequence[tuple[int, int]] = SHAPES,
    makers: Sequence[Any] | None = None,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:  # fmt: skip
    random = Random(1)
    a = description.arguments
    masks = ["no mask", "a bool mask", "a float mask"] if a.mask else ["no mask"]
    if a.mask and not a.selects:
        masks.remove("a bool mask")
    for batch, tokens in shapes:
        for mask in masks:
            kwargs = _arguments(description, observed, batch, tokens, 0, mask, random)
            yield f"batch {batch}, {tokens} tokens, {mask}", [kwargs]
    if a.cache:
        for make in _caches(bool(a.states)) if makers is None else makers:
            for mask in masks[1:]:
                caches = make(), make()
                calls: list[dict[str, Any]] = []
                for past, tokens in ((0, 4), (4, 1), (5, 3)):
                    length = _length(caches[0], past + tokens)
                    kwargs = _arguments(description, observed, 2, tokens, length - tokens, mask, random)
                    if a.states and calls:
                        kwargs[a.states] = calls[0][a.states]
                    calls.append({**kwargs, a.cache: caches})
                yield f"{type(caches[0]).__name__}, {mask}", calls


def _caches(pairs: bool) -> list[Any]:
    """Functions that make caches; pairs: of attention and of cross-attention."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return []

    def static() -> Any:
        return library.Cache(layer_class_to_replicate=lambda: library.StaticLayer(max_cache_len=12))

    class Other(library.DynamicLayer):  # type: ignore[name-defined]
        """A layer that a block does not know: its ``update`` is called."""

    def other() -> Any:
        return library.Cache(layer_class_to_replicate=Other)

    def paired(make: Any) -> Any:
        return lambda: library.EncoderDecoderCache(make(), library.DynamicCache())

    made = [library.DynamicCache, static, other]
    return [paired(make) for make in made] if pairs else made


def _length(cache: Any, tokens: int) -> int:
    cache = getattr(cache, "self_attention_cache", cache)
    return int(getattr(cache.layer_class_to_replicate(), "max_cache_len", tokens))


def _arguments(
    description: BlockDescription, observed: Observed, batch: int, tokens: int, past: int, mask: str, random: Random
) -> dict[str, Any]:
    a = description.arguments
    kwargs = {n: v for n, v in observed.arguments.items() if n in a.constants or n in a.unused}
    width = description.widths[0]
    first = (batch, tokens) if a.batch_first else (tokens, batch)
    kwargs[a.hidden] = random.normal((*first, width)).to(description.dtype)
    if a.padding:
        allowed = _mask("a bool mask" if mask != "no mask" else mask, batch, tokens, past, description.dtype, random)
        if allowed is not None:
            excluded, padded = ~allowed[0, 0], ~allowed[:, 0, 0]
            kwargs[a.mask] = excluded
            if mask == "a float mask":
                kwargs[a.mask] = random.normal(excluded.shape).masked_fill(excluded, -torch.inf)
                padded = zeros(padded.shape).masked_fill(padded, -torch.inf)
            kwargs[a.padding] = padded
    elif a.mask:
        kwargs[a.mask] = _mask(mask, batch, tokens, past, description.dtype, random)
    if a.bias:
        kwargs[a.bias] = random.normal((1, description.heads.query, tokens, past + tokens)).to(description.dtype)
    if a.states:
        states = observed.arguments[a.states]
        kwargs[a.states] = random.normal((batch, STATES, states.shape[-1])).to(description.dtype)
    if a.states_mask:
        allowed = random.uniform((batch, 1, tokens, STATES)) < 0.6
        allowed[..., 0] = True
        least = torch.finfo(description.dtype).min
        floats = zeros(allowed.shape, description.dtype).masked_fill(~allowed, least)
        kwargs[a.states_mask] = {"no mask": None, "a bool mask": allowed}.get(mask, floats)
    if a.cache:
        kwargs[a.cache] = None
    if a.rotary:
        shape = (batch if tokens > 1 else 1, tokens, observed.arguments[a.rotary][0].shape[-1])
        pair = (random.uniform(shape) * 2 - 1 for _ in range(2))
        kwargs[a.rotary] = tuple(t.to(description.dtype) for t in pair)
    return kwargs


def _mask(kind: str, batch: int, tokens: int, past: int, dtype: torch.dtype, random: Random) -> Any:
    if kind == "no mask":
        return None
    allowed = random.uniform((batch, 1, tokens, past + tokens)) < 0.6
    allowed[..., 0] = True  # a row without an allowed key is not defined by the blocks
    if kind == "a bool mask":
        return allowed
    return zeros(allowed.shape, dtype).masked_fill(~allowed, torch.finfo(dtype).min)


# -- checks at run time ------------------------------------------------------------------------------------------------
# On with the environment variable ``PENNYWEIGHT_CHECK=1``, or within :func:`checked`.

_CHECK: ContextVar[bool] = ContextVar("pennyweight_check", default=environment.CHECK.read() == "1")


class CheckError(RuntimeError):
    """A fused block or net and its own forward gave different results."""


def checks_enabled() -> bool:
    """Whether each call of a fused block or net also runs its own forward."""
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


def run_checked(fused: Callable[..., Any], block: Any, args: Any, kwargs: Any) -> Any:
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
