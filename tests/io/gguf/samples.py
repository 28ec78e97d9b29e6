"""GGUF files put together by hand, field by field; bytes of every block type; and ggml's own functions."""

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pennyweight.io.gguf.blocks import TYPES, BlockType

QUANTIZED = {name: t for name, t in TYPES.items() if not t.plain}
ALIGNMENT = 32


def random_raw(kind: BlockType, rows: int, n: int) -> Tensor:
    """Random bytes of rows, but for the patterns that stand for no number."""
    raw = torch.randint(0, 256, (rows, kind.row_bytes((rows, n))), dtype=torch.uint8)
    blocks = raw.view(-1, kind.nbytes)
    if kind.name == "TQ2_0":
        for shift in (0, 2, 4, 6):
            threes = ((blocks[:, :64] >> shift) & 3 == 3).to(torch.uint8)
            blocks[:, :64] -= threes << shift
    if kind.name == "MXFP4":
        blocks[:, 0].clamp_(max=252)  # beyond, elements overflow float32
    if kind.name == "NVFP4":
        blocks[:, :4].clamp_(max=126)
    return raw


@cache
def ggml() -> ctypes.CDLL | None:
    """ggml as the wheel of pywhispercpp brings it, or None."""
    found = find_spec("pywhispercpp")
    if found is None or found.origin is None:
        return None
    files = sorted((Path(found.origin).parents[1] / "pywhispercpp.libs").glob("libggml-base*.so*"))
    if not files:
        return None
    lib = ctypes.CDLL(str(files[0]))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    return lib


def _pointer(x: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def ggml_quantize(x: Tensor, kind: BlockType, importance: Tensor | None = None) -> Tensor:
    """[rows, row bytes] of x [rows, n] by ggml."""
    lib, data = ggml(), x.numpy()
    out = np.zeros((x.shape[0], kind.row_bytes(x.shape)), np.uint8)
    weights = None if importance is None else _pointer(importance.numpy())
    size = lib.ggml_quantize_chunk(
        ctypes.c_int(kind.id), _pointer(data), _pointer(out),
        *(ctypes.c_int64(n) for n in (0, *x.shape)), weights,
    )  # fmt: skip
    assert size == out.nbytes
    return torch.from_numpy(out)


def ggml_values(raw: Tensor, kind: BlockType, shape: tuple[int, ...]) -> Tensor:
    """float32 values of raw rows by ggml."""
    out, data = np.zeros(shape, np.float32), raw.numpy()
    getattr(ggml(), f"dequantize_row_{kind.name.lower()}")(_pointer(data), _pointer(out), ctypes.c_int64(out.size))
    return torch.from_numpy(out)


# -- files, by hand ----------------------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str | bytes, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def array(kind: int, count: int, raw: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + raw


def info(name: str | bytes, dims: list[int], kind: int, offset: int, axes: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name) + struct.pack("<I", len(dims) if axes is None else axes) + sizes + struct.pack("<IQ", kind, offset)
    )


GOOD_KV = [
    kv("general.architecture", 8, text("llama")),
    kv("general.alignment", 4, struct.pack("<I", ALIGNMENT)),
    kv("tokens", 9, array(8, 3, text("a") + text("") + text("ü"))),
    kv("scores", 9, array(6, 2, struct.pack("<2f", 0.5, -1.0))),
    kv("flag", 7, b"\1"),
]
GOOD_INFOS = [
    info("a.weight", [64, 3], 2, 0),  # Q4_0: 3 rows of 36 bytes, 108, padded to 128
    info("b.weight", [4], 0, 128),  # F32: 16 bytes, padded to 32
    info("c.weight", [2, 0], 0, 160),  # no bytes
    info("d.weight", [256, 1, 2], 12, 160),  # Q4_K: 288 bytes
]
GOOD_DATA = bytes(range(108)) + bytes(20) + struct.pack("<4f", 1, 2, 3, 4) + bytes(16) + bytes(288)


def build(**changes: Any) -> bytes:
    """The bytes of the good file, with some fields changed."""
    f = {"magic": b"GGUF", "version": 3, "kv": GOOD_KV, "infos": GOOD_INFOS, "data": GOOD_DATA, **changes}
    counts = struct.pack("<IQQ", f["version"], f.get("tensors", len(f["infos"])), f.get("keys", len(f["kv"])))
    head = f["magic"] + counts + b"".join(f["kv"]) + b"".join(f["infos"])
    alignment = f.get("alignment", ALIGNMENT)
    return head + bytes(-len(head) % alignment) + f["data"]


Change = Callable[[], bytes]


def replaced(items: list[bytes], at: int, new: bytes) -> list[bytes]:
    return [new if i == at else item for i, item in enumerate(items)]
