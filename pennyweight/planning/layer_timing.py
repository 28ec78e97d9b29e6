"""Times each layer of a plan on this machine, quantized against float."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..core.tensor import AffineQuantizedTensor
from .config_resolution import PlanError
from .parameters import kind_of
from .plan import Plan, PlanRow
from .quantize_report import Latency, relative_speed
from .run_batch import user_level

ROWS = (1, 64)  # one token, and a short prompt or batch: a scheme may be faster at one and slower at the other
SECONDS = 0.05  # per layer shape and number of rows
COUNTS = 3  # how many of the numbers of rows in a model's calls are timed per layer: the most frequent ones
ROUNDS = 3  # minimum number of rounds, also if one takes longer than SECONDS
SAMPLE = 20e-6  # seconds of calls between two reads of the clock, which take 0.1 µs
DEVICE_SAMPLE = 1e-3  # the same if each sample ends with a device synchronization
# Between two calls of a layer a model reads all its other weights, so the timing rotates through copies of the layer:
# as many bytes as the model has, at most ROTATED (four times the 32 MB last-level cache of many CPUs), at most COPIES.
ROTATED, COPIES = 1 << 27, 256

CONVOLUTIONS = ("convolution", "transposed_convolution")
UNKNOWN_SIZE = "speed not measured: it depends on the size of the input; recommend(model, example) measures it"

Size = int | tuple[int, ...]  # of an input: rows of a linear layer, the shape for a convolution
Calls = dict[Hashable, Counter[Size]]  # see layer_calls
Rows = Callable[[PlanRow], Sequence[Size]]
Call = Callable[[], object]
TimeLayer = Callable[[PlanRow, AffineQuantizedTensor, tuple[Size, ...], tuple[int, int]], tuple[Latency, ...]]


class PerformanceWarning(UserWarning):
    """A quantized layer was measured to be slower than the float one."""


def row_counts(measure: bool | Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows of ``measure=``. Raises PlanError for anything but a bool or positive numbers of rows."""
    if isinstance(measure, bool):
        return ROWS if measure else ()
    rows = tuple(measure) if isinstance(measure, (tuple, list, range)) else ()
    if not rows or not all(type(m) is int and m > 0 for m in rows):
        raise PlanError(f"measure must be True, or positive numbers of rows such as (1, 64), got {measure!r}")
    return tuple(dict.fromkeys(rows))


def measure_(
    plan: Plan,
    rows: Rows,
    quantized: Callable[[PlanRow], AffineQuantizedTensor],
    timed: TimeLayer | None = None,
) -> None:
    """Fill in ``latency`` of every active row that is a linear layer or a convolution; equal layers are measured once.

    rows       sizes of a layer's input: numbers of rows, or shapes for a convolution. One without a shape is not timed,
               and its note says so
    quantized  makes the weight of a row, in the layout of its kernel
    timed      replaces :func:`time_layer`

    The weights in the model are only read. Memory: one quantized weight and at most twice 128 MB of copies.
    """
    found: dict[Hashable, tuple[Latency, ...]] = {}
    limit = min(ROTATED, sum(r.bytes_before for r in plan.rows)), min(ROTATED, sum(r.bytes_after for r in plan.rows))
    for row in plan.active:
        if not measurable(row):
            continue
        asked, convolves = tuple(rows(row)), _convolves(row)
        counts = tuple(size for size in asked if isinstance(size, tuple) == convolves)
        if asked and not counts:
            row.note = "; ".join(filter(None, (row.note, UNKNOWN_SIZE)))
        key = (*_key(row), counts)
        if key not in found:
            found[key] = (timed or time_layer)(row, quantized(row), counts, limit) if counts else ()
        row.latency = found[key]


def measurable(row: PlanRow) -> bool:
    """Whether a row is a 2-d weight of a linear layer, or one of a convolution."""
    return row.scheme is not None and (("linear" in row.ops and len(row.shape) == 2) or _convolves(row))


def _convolves(row: PlanRow) -> bool:
    return row.site is not None and row.site.op in CONVOLUTIONS and not row.site.bare


def layer_calls(model: nn.Module, run: Call) -> tuple[Calls, Any]:
    """(Sizes of the inputs that each layer gets while ``run`` calls the model, what it returns).

    By the id of a module: numbers of rows, or shapes for a convolution. By (id, "hidden") of a recurrent network: the
    rows of its products with hidden weights, one per step.
    """
    seen: Calls = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = (*args, *kwargs.values())
        x: Any = next((a for a in given if isinstance(a, (Tensor, PackedSequence))), None)
        data: Any = x.data if isinstance(x, PackedSequence) else x
        if data is None or not data.numel():
            return
        kind = kind_of(module)
        calls = seen.setdefault(id(module), Counter())
        if kind is not None and kind.op in CONVOLUTIONS:
            spatial = module.weight.ndim - 2  # type: ignore[operator]
            calls[tuple(data.shape) if data.ndim == spatial + 2 else (1, *data.shape)] += 1
            return
        calls[data.numel() // data.shape[-1]] += 1
        if isinstance(module, nn.RNNBase):
            steps = seen.setdefault((id(module), "hidden"), Counter())
            if isinstance(x, PackedSequence):
                steps.update(x.batch_sizes.tolist())
            else:
                length = data.shape[1 if module.batch_first and data.ndim == 3 else 0]
                steps[data.numel() // data.shape[-1] // length] += length

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in model.modules() if _is_timed(m)]
    try:
        return seen, run()
    finally:
        for hook in hooks:
            hook.remove()


def _is_timed(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind is not None and (kind.default or kind.op in CONVOLUTIONS)


def calls_of_weight(row: PlanRow, seen: Calls) -> Counter[Size]:
    """How often the layers of a weight were called, by size of the input, from :func:`layer_calls`."""
    keys: set[Hashable] = set()
    for place in row.places:
        hidden = isinstance(place.module, nn.RNNBase) and not place.param.startswith("weight_ih")
        keys.add((id(place.module), "hidden") if hidden else id(place.module))
    return sum((seen[key] for key in keys if key in seen), Counter())


def skip_slower_(plan: Plan) -> None:
    """Remove the scheme of each layer that was measured to be slower, with the reason as its note."""
    for row in plan.active:
        slower = [t for t in row.latency if t.slower]
        if slower and row.scheme is not None:
            row.note = (
                f"left unquantized: {row.scheme.shorten(len(row.shape))} with {row.kernel} is {_text(slower)} here"
            )
            row.scheme, row.kernel, row.layout, row.bytes_after = None, "", "plain", row.bytes_before


def warn_slower(plan: Plan) -> None:
    """One PerformanceWarning per layer shape that was measured to be slower than float."""
    alike: dict[Hashable, list[PlanRow]] = {}
    for row in plan.active:
        if any(t.slower for t in row.latency):
            alike.setdefault((_key(row), row.latency), []).append(row)
    for rows in alike.values():
        one = rows[0]
        assert one.scheme is not None
        scheme = one.scheme.shorten(len(one.shape))
        names = ", ".join(r.name for r in rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
        warnings.warn(
            f"{names}: {list(one.shape)} as {scheme} with {one.kernel} is slower than float here, "
            f"{_text([t for t in one.latency if t.slower])}; on_slower='skip' leaves such layers float",
            PerformanceWarning,
            stacklevel=user_level(),
        )


def _text(latency: list[Latency]) -> str:
    return ", ".join(
        f"{relative_speed(t.speed)} at {t.label}" + ("" if t.shape else f" row{'s' * (t.rows > 1)}") for t in latency
    )


# -- one layer -------------------------------------------------------------------------------------------------------


def _key(row: PlanRow) -> tuple[Hashable, ...]:
    """Everything that the speed of a layer depends on."""
    assert row.site is not None
    dtype, where = row.site.dtype, (row.site.device, row.layout, row.kernel)
    alike = (row.site.shape, row.site.transposed, row.scheme, dtype, where, _bias(row) is None)
    if not _convolves(row):
        return alike
    module = row.places[0].module
    return *alike, *(getattr(module, name, None) for name in _GEOMETRY)


_GEOMETRY = ("stride", "padding", "dilation", "groups", "padding_mode", "output_padding")


def _bias(row: PlanRow) -> Tensor | None:
    """The bias that goes with a weight: "in_proj_bias" with "in_proj_weight"."""
    found = (p.module._parameters.get(p.param.replace("weight", "bias")) for p in row.places if p.own)
    return next((b for b in found if b is not None), None)


def time_layer(
    row: PlanRow, w: AffineQuantizedTensor, rows: tuple[Size, ...], limit: tuple[int, int]
) -> tuple[Latency, ...]:
    """Time a row's layer with its float weight and with w, at each size of its input: a number of rows, or the shape
    for a convolution. limit: bytes of copies of each."""
    assert row.tensor is not None
    assert row.site is not None
    plain = row.tensor.detach()
    if isinstance(plain, AffineQuantizedTensor):
        plain = plain.dequantize()
    plain, bias = plain.to(w.device), _bias(row)
    bias = None if bias is None else bias.detach().to(w.device)
    product = _convolution(row) if _convolves(row) else _product if row.site.transposed else F.linear
    sides = [_copies(plain, limit[0]), _copies(w, limit[1])]
    out = []
    for m in rows:
        shape = m if isinstance(m, tuple) else (m, row.site.shape[-1])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        x = x.to(w.device, row.site.dtype)
        slow, fast = least_seconds([_calls(product, x, side, bias) for side in sides], SECONDS, wait_for(w.device))
        positions = m if isinstance(m, int) else math.prod(m) // m[1]
        out.append(Latency(positions, slow * 1e6, fast * 1e6, m if isinstance(m, tuple) else ()))
    return tuple(out)


def _convolution(row: PlanRow) -> Callable[..., Tensor]:
    """The call of a convolution's module, with another weight."""
    assert row.site is not None
    module: Any = row.places[0].module
    if row.site.op == "convolution":
        return module._conv_forward
    call = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(row.site.shape) - 3]
    rest = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
    return lambda x, w, bias: call(x, w, bias, *rest)


def _product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """With a weight [in, out], as Hugging Face's Conv1D calls it."""
    return x @ w if bias is None else torch.addmm(bias, x, w)


def _copies(w: Tensor, nbytes: int) -> list[Tensor]:
    """w and copies of it, ``nbytes`` in total; at least w itself."""
    return [w, *(copy.deepcopy(w) for _ in range(min(COPIES, nbytes // max(1, int(w.nbytes))) - 1))]


def _calls(product: Callable[..., Tensor], x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Call:
    turn = itertools.cycle(weights)
    return lambda: product(x, next(turn), bias)


def wait_for(device: torch.device) -> Call | None:
    """The synchronization function of the device; None for a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).synchronize


# -- the clock -------------------------------------------------------------------------------------------------------


def least_seconds(
    calls: Sequence[Call], seconds: float = SECONDS, wait: Call | None = None, turn: float = 0.0
) -> list[float]:
    """Minimum seconds of one call of each, timed in turns, so that load on the machine affects all of them equally.

    seconds  total, if that gives each call three turns
    wait     called at the end of each sample, which is then longer: for asynchronous devices
    turn     seconds of samples per turn; at least one sample
    """
    sample = SAMPLE if wait is None else DEVICE_SAMPLE
    best, counts, turns = [], [], []
    for call in calls:
        once = max(min(_time(call, 1, wait) for _ in range(2)), 1e-9)
        counts.append(max(1, int(sample / once)))
        turns.append(max(1, int(turn / (counts[-1] * once))))
        best.append(float("inf"))
    end, done = perf_counter() + seconds, 0
    while done < ROUNDS or perf_counter() < end:
        for i, call in enumerate(calls):
            best[i] = min(best[i], *(_time(call, counts[i], wait) for _ in range(turns[i])))
        done += 1
    return best


def _time(call: Call, count: int, wait: Call | None) -> float:
    """Seconds per call."""
    start = perf_counter()
    for _ in range(count):
        call()
    if wait is not None:
        wait()
    return (perf_counter() - start) / count
