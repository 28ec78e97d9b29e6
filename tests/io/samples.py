"""A small model with every kind of part, as a file; and files taken apart and put together again."""

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pennyweight.core.formats import INT4, INT8, TERNARY, UINT4
from pennyweight.core.spec import FP8_ROW, MXFP8, NF4_DOUBLE, NVFP4, TINYGEMM, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io import save

STATIC = ActivationSpec(QuantSpec(INT8, None, zero_point=True), "static")
SPECS = {
    "int4": QuantSpec(INT4, (32,), scale=torch.bfloat16),
    "odd": QuantSpec(INT4, (5,)),  # 37 is padded to 40
    "rows": QuantSpec(UINT4, (1, 37), zero_point=True),  # 37 codes of 4 bits leave half a byte unused
    "ternary": QuantSpec(TERNARY, None),
    "e4m3": FP8_ROW,
    "mx": MXFP8,
    "fp8": NVFP4,
    "nested": NF4_DOUBLE,
    "shifted": TINYGEMM,
    "static": QuantSpec(INT8, (-1,)),
    "reordered": QuantSpec(UINT4, (16,), scale=torch.float16, zero_point=True),
    "conv": QuantSpec(INT4, (-1, -1, -1)),
    "scaled": QuantSpec(INT8, (-1,)),
}


class Model(nn.Module):
    """One layer per spec, a tied head, buffers of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        for name in SPECS:
            linear = nn.Linear(37 if name in ("odd", "rows") else 64, 8)
            self.add_module(name, nn.Conv2d(4, 8, (3, 3)) if name == "conv" else linear)
        self.tied = nn.Linear(64, 8, bias=False)
        self.tied.weight = self.int4.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))


def sample_model() -> Model:
    """The model with its layers quantized, the same numbers every time."""
    torch.manual_seed(1)
    model = Model()
    for name, spec in SPECS.items():
        layer = model.get_submodule(name)
        act = STATIC if name == "static" else None
        w = AffineQuantizedTensor.from_float(layer.weight, spec, act=act, name=name)
        if act is not None:
            w = w.with_(act_scale=torch.tensor([0.5]), act_zero_point=torch.tensor([3], dtype=torch.int8))
        if name == "reordered":  # the one thing for which a file says version 2
            w = w.with_(perm=torch.randperm(64).to(torch.int32))
        if name == "scaled":  # the one thing for which a file says version 5
            w = w.with_(pre_scale=torch.rand(64) + 0.5)
        layer.weight = nn.Parameter(w, requires_grad=False)
    model.tied.weight = model.int4.weight
    return model


@cache
def _files(max_shard_bytes: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save(sample_model(), folder, max_shard_bytes=max_shard_bytes)
        return {f.name: f.read_bytes() for f in sorted(Path(folder).iterdir())}


def sample_file(folder: Path) -> Path:
    """The sample as one file."""
    path = folder / "sample.safetensors"
    path.write_bytes(_files(1 << 30)["model.safetensors"])
    return path


def sample_folder(folder: Path) -> Path:
    """The sample as a folder of several shards."""
    path = folder / "sharded"
    path.mkdir()
    for name, content in _files(1000).items():
        (path / name).write_bytes(content)
    return path


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a file."""
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def join(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A file of a header (bytes, or what JSON can say) and data; ``length``: the lie to tell about the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def edit_manifest(header: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The header with its manifest changed in place, or replaced by what ``change`` returns."""
    manifest = json.loads(header["__metadata__"]["pennyweight"])
    new = change(manifest)
    header["__metadata__"]["pennyweight"] = json.dumps(manifest if new is None else new)
    return header


def edit_bytes(header: dict[str, Any], data: bytes, name: str, at: int, new: bytes) -> bytes:
    """The data with bytes of one tensor changed, from offset ``at`` (negative: from its end)."""
    begin, end = header[name]["data_offsets"]
    start = (end if at < 0 else begin) + at
    return data[:start] + new + data[start + len(new) :]


def replace_tensor(
    header: dict[str, Any], data: bytes, name: str, entry: tuple[str, list[int], bytes] | None
) -> tuple[dict[str, Any], bytes]:
    """The file with one tensor removed (None) or replaced or added as (dtype, shape, bytes), offsets made right."""
    tensors = {k: (v["dtype"], v["shape"], data[slice(*v["data_offsets"])]) for k, v in header.items() if k[:2] != "__"}
    tensors.pop(name, None)
    if entry is not None:
        tensors[name] = entry
    out: dict[str, Any] = {"__metadata__": header["__metadata__"]}
    body = b""
    for key, (dtype, shape, raw) in tensors.items():
        out[key] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    return out, body
