"""Times each kind of quantized linear layer against its float version on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ..core.tensor import AffineQuantizedTensor
from ..planning.layer_timing import ROTATED, ROWS, time_layer
from ..planning.parameters import Site, make_site
from ..planning.plan import PlanRow
from ..planning.report import Latency
from .layers import model_bytes, pairs, unwrapped


def time_layers(
    exact: nn.Module, found: nn.Module, rows: Sequence[int] = ROWS, progress: Callable[[str], None] | None = None
) -> dict[str, tuple[Latency, ...]]:
    """Latency of each quantized linear layer by the name of its weight; equal layers are timed once."""
    exact, found = unwrapped(exact), unwrapped(found)
    limit = min(ROTATED, model_bytes(exact)), min(ROTATED, model_bytes(found))
    known: dict[object, tuple[Latency, ...]] = {}
    out: dict[str, tuple[Latency, ...]] = {}
    for pair in pairs(exact, found)[0]:
        w, plain = pair.found.get(), pair.exact.get()
        site = make_site(pair.exact, plain)
        if not isinstance(w, AffineQuantizedTensor) or not isinstance(site, Site) or site.op != "linear" or w.ndim != 2:
            continue
        bias = getattr(pair.exact.module, pair.exact.param.replace("weight", "bias"), None)
        key = (site.shape, site.transposed, w.spec, w.act, w.dtype, site.dtype, bias is None)
        if key not in known:
            if progress is not None:
                progress(pair.name)
            row = PlanRow(
                pair.name, site.type_name, tuple(w.shape), plain.nbytes, w.nbytes, plain, (pair.exact,), site=site
            )
            known[key] = time_layer(row, w, tuple(rows), limit)
        out[pair.name] = known[key]
    return out


def overall(latency: dict[str, tuple[Latency, ...]]) -> dict[int, float]:
    """Overall speed of the layers relative to float, by number of rows: the ratio of the total times."""
    sums: dict[int, tuple[float, float]] = {}
    for times in latency.values():
        for t in times:
            a, b = sums.get(t.rows, (0.0, 0.0))
            sums[t.rows] = (a + t.float_us, b + t.quantized_us)
    return {rows: a / b for rows, (a, b) in sums.items() if b > 0}
