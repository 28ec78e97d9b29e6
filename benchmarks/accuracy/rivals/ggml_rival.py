"""llama.cpp's own quantizer, ggml_quantize_chunk, from the library in pywhispercpp's wheel: K-quants and I-quants.

With an importance matrix (mean squares of the layers' inputs) as llama-quantize takes it, and without. One type for all
layers, but for those whose columns are not whole blocks: they get the type that llama.cpp falls back to. Its mixtures
(the _M and _S of its file names) give some layers more bits.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.accounting import Bits, BitsByColumns
from benchmarks.accuracy.rivals.base import ALL, SMOLLM2, Row, layers, second_moments
from benchmarks.accuracy.subjects import Subject

# name -> ggml's number, weights in a block, bytes of it (ggml-common.h)
TYPES = {
    "Q4_0": (2, 32, 18), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "IQ3_S": (21, 256, 110),
    "IQ3_XXS": (18, 256, 98), "IQ2_S": (22, 256, 82), "IQ2_XS": (17, 256, 74), "IQ2_XXS": (16, 256, 66),
}  # fmt: skip
BLOCKS = TYPES | {"Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34)}
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # src/llama-quant.cpp; of all others IQ4_NL


def type_for(name: str, columns: int) -> str:
    """Of a layer: llama.cpp takes another type where the blocks do not divide its rows."""
    return name if columns % TYPES[name][1] == 0 else INSTEAD.get(name, "IQ4_NL")


@cache
def _library() -> ctypes.CDLL:
    found = find_spec("pywhispercpp")
    folder = Path(found.origin).parents[1] / "pywhispercpp.libs" if found and found.origin else Path()
    files = sorted(folder.glob("libggml-base*.so*"))
    if not files:
        raise FileNotFoundError(f"no ggml library in {folder.name}; only Linux wheels of pywhispercpp bring one")
    library = ctypes.CDLL(str(files[0]))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def _pointer(t: Tensor | None) -> ctypes.c_void_p | None:
    return None if t is None else ctypes.c_void_p(t.data_ptr())


def _through(w: Tensor, name: str, importance: Tensor | None) -> Tensor:
    rows, columns = w.shape
    name = type_for(name, columns)
    number, block, nbytes = BLOCKS[name]
    w, library = w.float().contiguous(), _library()
    raw = torch.zeros(rows * columns // block * nbytes, dtype=torch.uint8)
    library.ggml_quantize_init(ctypes.c_int(number))
    size = library.ggml_quantize_chunk(
        ctypes.c_int(number), _pointer(w), _pointer(raw),
        *(ctypes.c_int64(n) for n in (0, rows, columns)), _pointer(importance),
    )  # fmt: skip
    if size != raw.numel():
        raise ValueError(f"ggml wrote {size} bytes, {raw.numel()} expected")
    value = torch.zeros_like(w)
    getattr(library, f"dequantize_row_{name.lower().replace('_k', '_K')}")(
        _pointer(raw), _pointer(value), ctypes.c_int64(w.numel())
    )
    return value


@cache
def _importance(subject: Subject) -> dict[str, Tensor]:
    return second_moments(subject, subject.model())


def _run(name: str, important: bool) -> Any:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        weights = _importance(subject) if important else {}
        for layer_name, layer in layers(subject, model).items():
            layer.weight.data = _through(layer.weight.data, name, weights.get(layer_name))
        return model

    return run


def _bits(name: str) -> BitsByColumns:
    def of_columns(columns: int) -> Bits:
        _, block, nbytes = BLOCKS[type_for(name, columns)]
        return Bits(8 * nbytes / block)

    _, block, nbytes = BLOCKS[name]
    why = f"{nbytes} bytes per block of {block}"
    if block > 32:
        why += f"; {type_for(name, 1)} where {block} does not divide the columns, as llama.cpp does"
    return BitsByColumns(of_columns, why)


_SOME = ("Q4_0", "Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS")  # the others are mostly IQ4_NL there too
ROWS = (
    *(
        Row(name, _run(name, False), _bits(name), subjects=ALL + SMOLLM2)
        for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
    ),
    *(
        Row(f"{name} imatrix", _run(name, True), _bits(name), subjects=ALL + SMOLLM2 if name in _SOME else ALL)
        for name in TYPES
    ),
)
