"""Native embedding lookup: only the rows asked for are read and become floats.

One row for tables whose rows lie together, which planning prefers, and one for each packing of ``linear``, so that a
table that is also a linear layer's weight keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core import conversions
from ...core.formats import E8M0
from ...core.layouts import READABLE
from ...core.spec import DTYPES, QuantSpec
from ...core.tensor import AffineQuantizedTensor, static_json
from ..gather import gather
from ..linear import LIBRARY, _flatten, _nest
from ..table import Case, Kernel, register_kernel
from . import float_linear, int_linear
from .affine import affine
from .convert import floats_of
from .library import missing


def _accepts(case: Case) -> bool | str:
    verdict = missing()
    if verdict is not True:
        return verdict
    for kind in (case.spec.scale, case.spec.offset):
        if isinstance(kind, QuantSpec) and not (kind.format is E8M0 and kind.scale is None):
            return "its scale is itself quantized"
    if len(case.shape) != 2 or affine(case.spec, case.shape, case.dtype, by_row=True) is None:
        return f"reads tables of float32, bfloat16 or float16, not {list(case.shape)} {case.dtype}"
    return True


def _accepts_rows(case: Case) -> bool | str:
    return _accepts(case) if case.spec.layout in READABLE else 'reads layouts "plain" and "bits"'


def _accepts_packed(layout: Any) -> Callable[[Case], bool | str]:
    def accepts(case: Case) -> bool | str:
        verdict = layout.fits(case.spec, case.shape)
        return _accepts(case) if verdict is True else verdict

    return accepts


def rows(index: Tensor, w: Any, spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """w[index] as floats. index: int32 or int64, any shape; w: what has the parts of a table [V, D] as attributes."""
    if index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(f"embedding: indices must be int32 or int64, got {index.dtype}")
    a = affine(spec, shape, dtype, by_row=True)
    assert a is not None
    out = torch.empty((*index.shape, shape[1]), dtype=dtype, device="cpu")
    return floats_of(w, spec, a, index.long().contiguous(), out) if out.numel() else out


def lookup(index: Tensor, w: AffineQuantizedTensor, bias: None = None) -> Tensor:
    """w[index] as floats of w's dtype. Raises IndexError out of range, as torch does."""
    if not torch.compiler.is_compiling():
        if conversions.in_memory(w._codes) and conversions.in_memory(index):
            return rows(index, w.parts, w.spec, tuple(w.shape), w.dtype)
        if type(w._codes) is Tensor and w.spec.layout in READABLE:
            return gather(index, w)
    key = json.dumps({"tree": _flatten(w)[1], "weight": json.loads(static_json(w))})
    return torch.ops.pennyweight.embedding.default(index, _flatten(w)[0], key)


# -- the op that graphs hold -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parse_key(key: str) -> tuple[Any, ...]:
    data = json.loads(key)
    w = data["weight"]
    return data["tree"], QuantSpec.from_dict(w["spec"]), tuple(w["shape"]), DTYPES[w["dtype"]]


def _op(index: Tensor, parts: list[Tensor], key: str) -> Tensor:
    tree, spec, shape, dtype = _parse_key(key)
    return rows(index, _nest(tree, list(parts)), spec, shape, dtype)


def _fake(index: Tensor, parts: list[Tensor], key: str) -> Tensor:
    _, _, shape, dtype = _parse_key(key)
    return parts[0].new_empty((*index.shape, shape[1]), dtype=dtype)


LIBRARY.define("embedding(Tensor index, Tensor[] parts, str key) -> Tensor")
LIBRARY.impl("embedding", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::embedding", _fake, lib=LIBRARY)

register_kernel(Kernel("embedding", "cpu_rows", lookup, _accepts_rows, ("cpu",), None, rank=30, tolerance="exact"))
for _name, _of in (("cpu_tiles", int_linear), ("cpu_float_tiles", float_linear)):
    register_kernel(
        Kernel("embedding", _name, lookup, _accepts_packed(_of), ("cpu",), _of.LAYOUT.name, rank=20, tolerance="exact")
    )
