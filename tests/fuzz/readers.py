"""What is fuzzed: a row for each reader of files. Nothing but CheckpointError may leave one."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pennyweight.core.numerics import dequantize
from pennyweight.io import CheckpointError, load
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.container import File
from pennyweight.io.gguf.values import Value
from pennyweight.io.gguf.writing import Writer


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


def native_seeds() -> list[bytes]:
    from tests.io.samples import sample_file

    with tempfile.TemporaryDirectory() as folder:
        return [sample_file(Path(folder)).read_bytes()]


def run_native(path: str) -> None:
    try:
        load(path)
    except CheckpointError:
        return


READERS = {
    "gguf": Reader(".gguf", gguf_seeds, run_gguf),
    "native": Reader(".safetensors", native_seeds, run_native),
}
