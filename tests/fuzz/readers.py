"""What is fuzzed: a row for each reader of files. Nothing but CheckpointError may leave one."""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import pennyweight as pw
from pennyweight.core import spec as specs
from pennyweight.core.formats import NF4, UINT4
from pennyweight.core.numerics import dequantize
from pennyweight.io import CheckpointError, load
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.gguf_file import File, Writer
from pennyweight.io.gguf.imatrix import Imatrix, Moments, read_imatrix, write_imatrix
from pennyweight.io.gguf.metadata import Value
from pennyweight.io.gguf.reader import under_hf_names, write_side_files


@dataclass(frozen=True)
class Reader:
    """seeds: good files, to begin with. run: reads a file with those bytes, all of it. It swallows CheckpointError."""

    suffix: str
    seeds: Callable[[], list[bytes]]
    run: Callable[[str], None]


def gguf_seeds() -> list[bytes]:
    """A file for each type, with a value of each kind of metadata."""
    metadata = {
        "general.architecture": Value("string", "llama"), "general.alignment": Value("uint32", 32),
        "u": Value("uint8", 1), "f": Value("float32", 0.5), "b": Value("bool", True), "i": Value("[int32]", [1, -2]),
        "tokens": Value("[string]", ["a", "", "ü"]), "flags": Value("[bool]", [True, False]), "n": Value("int64", -1),
    }  # fmt: skip
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in TYPES.items():
            path = Path(folder) / f"{name}.gguf"
            infos = {"a.weight": (kind, (2, kind.elements)), "b": (TYPES["F32"], (3,)), "c": (TYPES["F16"], (0, 2))}
            writer = Writer(str(path), metadata, infos)
            for tensor, e in writer.entries.items():
                writer.put(tensor, torch.ones((e.rows, e.row_bytes), dtype=torch.uint8))
            writer.finish()
            out.append(path.read_bytes())
    return out


def run_gguf(path: str) -> None:
    """Open, look at all metadata, decode every tensor. Codes that are no numbers are a ValueError of the block type."""
    try:
        file = File(path)
    except CheckpointError:
        return
    with file as f:
        for value in f.metadata.values():
            value.to_bytes()
            _ = value.data
        for name, e in f.entries.items():
            raw = f.rows(name, 0, e.rows)
            try:
                parts = e.type.decode(raw, e.shape)
            except ValueError as error:
                if not str(error).startswith(e.type.name):
                    raise
                continue
            if not e.type.plain:
                dequantize(parts, e.type.spec, e.shape)
            if e.type.writable:
                e.type.encode(parts, e.shape)
    run_open(path)


def run_open(path: str) -> None:
    """As users open it: every tensor, then under Hugging Face's names, and what would be written beside it."""
    try:
        with pw.open(path) as checkpoint:
            read_all(checkpoint)
            if checkpoint.format == "gguf":
                with tempfile.TemporaryDirectory() as folder:
                    write_side_files(under_hf_names(checkpoint), folder, None)
    except CheckpointError:
        return


def read_all(checkpoint: pw.Opened) -> None:
    for name in checkpoint:
        try:
            tensor = checkpoint[name]
        except CheckpointError:
            continue
        if isinstance(tensor, pw.AffineQuantizedTensor):
            tensor.dequantize()


# -- safetensors of other libraries ------------------------------------------------------------------------------------
# An input is config.json and model.safetensors one after the other: 4 bytes, the length of the first, little-endian.


def run_folder(path: str) -> None:
    data = Path(path).read_bytes()
    size = int.from_bytes(data[:4], "little")
    folder = Path(path).with_suffix(".folder")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "config.json").write_bytes(data[4 : 4 + size])
    (folder / "model.safetensors").write_bytes(data[4 + size :])
    run_open(str(folder))


def joined(folder: Path) -> bytes:
    config, weights = (folder / "config.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    return len(config).to_bytes(4, "little") + config + weights


F16 = torch.float16
# Weights that each format has exactly
WEIGHTS: dict[str, list[tuple[pw.QuantSpec, tuple[int, ...]]]] = {
    "compressed-tensors": [
        (specs.INT8_ROW, (8, 32)), (specs.INT4_GROUP, (8, 64)), (specs.FP8_ROW, (8, 32)), (specs.FP8_BLOCK, (130, 140)),
        (specs.MXFP4, (8, 64)), (pw.QuantSpec(specs.INT4, (32,), scale=F16, zero_point=True), (8, 64)),
    ],
    "fp8": [(specs.FP8_BLOCK, (130, 256))],
    "mxfp4": [(specs.MXFP4, (2, 8, 64))],
    "bitsandbytes": [(specs.INT8_ROW, (8, 32)), (pw.QuantSpec(NF4, (64,)), (8, 64))],
    "awq": [(pw.QuantSpec(UINT4, (32,), scale=F16, zero_point=True), (8, 64))],
    "gptq": [(pw.QuantSpec(UINT4, (32,), scale=F16, mid=8), (32, 64))],
    "gptq_v2": [(pw.QuantSpec(UINT4, (32,), scale=F16, zero_point=True), (32, 64))],
}  # fmt: skip


def folder_seeds(name: str) -> list[bytes]:
    """A folder for each kind of weight that the format has."""
    torch.manual_seed(0)
    out = []
    for spec, shape in WEIGHTS[name]:
        w = pw.AffineQuantizedTensor.from_float(torch.randn(shape), spec)
        key = "a.experts.gate_up_proj" if name == "mxfp4" else "a.b.weight"
        w = w.transpose(-2, -1) if name == "mxfp4" else w  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            pw.save({key: w, "norm.weight": torch.ones(4, dtype=F16)}, folder / "own")
            (folder / "own" / "config.json").write_text("{}")
            pw.convert(folder / "own", folder / name, to=name)
            out.append(joined(folder / name))
    return out


def hqq_seeds() -> list[bytes]:
    from tests.io.codecs import test_hqq

    layers = [(4, 64, 1), (3, 64, 1), (8, 64, 0), (2, 32, 1)]
    return [saved(test_hqq.layer((8, 128), bits, size, axis)[0], test_hqq.CONFIG) for bits, size, axis in layers]


def torchao_seeds() -> list[bytes]:
    from pennyweight.io.codecs.torchao.flattened_safetensors import flatten_tensor_state_dict

    out = []
    for spec, shape in ((specs.INT8_ROW, (4, 32)), (specs.FP8_ROW, (4, 32)), (specs.MXFP8, (4, 32))):
        w = pw.AffineQuantizedTensor.from_float(torch.randn(shape), spec)
        tensors, metadata = flatten_tensor_state_dict({"a.weight": w, "b.bias": torch.zeros(2)})
        out.append(saved(tensors, {"quant_method": "torchao"}, metadata))
    return out


def saved(tensors: dict[str, torch.Tensor], method: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_file(tensors, folder / "model.safetensors", metadata)
        (folder / "config.json").write_text(json.dumps({"quantization_config": method}))
        return joined(folder)


def native_seeds() -> list[bytes]:
    from tests.io.samples import sample_file

    with tempfile.TemporaryDirectory() as folder:
        return [sample_file(Path(folder)).read_bytes()]


def run_native(path: str) -> None:
    try:
        load(path)
    except CheckpointError:
        return


def imatrix_seeds() -> list[bytes]:
    """An importance matrix of either format; the first ends without padding."""
    moments = {
        "a.weight": Moments(torch.ones(2, 4), torch.ones(2)),
        "b.weight": Moments(torch.ones(8, 1), torch.ones(8)),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_imatrix(Imatrix(moments, "", 2, 512, ("text",)), Path(folder) / "i.gguf")
        entry = struct.pack("<i", 8) + b"a.weight" + struct.pack("<ii4f", 3, 4, 1, 2, 3, 4)
        dat = struct.pack("<i", 1) + entry + struct.pack("<ii", 2, 4) + b"text"
        return [(Path(folder) / "i.gguf").read_bytes(), dat]


def run_imatrix(path: str) -> None:
    try:
        found = read_imatrix(path)
        for name, m in found.moments.items():
            assert found.importance(name, (m.sums.shape[0], 2, m.sums.shape[1])) is not None
    except CheckpointError:
        return


READERS = {
    "imatrix": Reader(".imatrix", imatrix_seeds, run_imatrix),
    "gguf": Reader(".gguf", gguf_seeds, run_gguf),
    "native": Reader(".safetensors", native_seeds, run_native),
    "hqq": Reader(".input", hqq_seeds, run_folder),
    "torchao": Reader(".input", torchao_seeds, run_folder),
    **{name: Reader(".input", partial(folder_seeds, name), run_folder) for name in WEIGHTS},
}
