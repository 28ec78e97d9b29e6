"""Folders that must be refused: bad indexes, shards that do not agree, links, pipes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.io.samples import join, replace_tensor, sample_folder, split

INDEX = "model.safetensors.index.json"


def sharded(change: Callable[[Path, dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """A case that changes a sharded checkpoint: change(folder, index) -> a new index (or its bytes), or None."""

    def case(folder: Path) -> Path:
        path = sample_folder(folder)
        index_path = path / INDEX
        index = json.loads(index_path.read_text())
        new = change(path, index)
        new = index if new is None else new
        index_path.unlink(missing_ok=True)
        if new != b"":
            index_path.write_bytes(new if isinstance(new, bytes) else json.dumps(new).encode())
        return path

    return case


def shard_named(name: Any) -> Callable[[Path], Path]:
    """A case whose index names that file for one tensor."""
    return sharded(lambda folder, index: index["weight_map"].update({"steps": name}))


def _first(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _link_out(folder: Path, index: dict[str, Any]) -> None:
    shard = _first(folder)
    os.replace(shard, folder.parent / "outside.safetensors")
    shard.symlink_to(folder.parent / "outside.safetensors")


def _index_link_out(folder: Path) -> Path:
    path = sharded(lambda folder, index: None)(folder)
    os.replace(path / INDEX, folder / "outside.json")
    (path / INDEX).symlink_to(folder / "outside.json")
    return path


def _pipe(folder: Path, index: dict[str, Any]) -> None:
    shard = _first(folder)
    shard.unlink()
    os.mkfifo(shard)


def _two_homes(folder: Path, index: dict[str, Any]) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    header, data = split(second.read_bytes())
    name = next(k for k in split(first.read_bytes())[0] if k[:2] != "__")
    h1, d1 = split(first.read_bytes())
    body = d1[slice(*h1[name]["data_offsets"])]
    second.write_bytes(join(*replace_tensor(header, data, name, (h1[name]["dtype"], h1[name]["shape"], body))))


def _extra(folder: Path, index: dict[str, Any]) -> None:
    shard = _first(folder)
    shard.write_bytes(join(*replace_tensor(*split(shard.read_bytes()), "surplus", ("U8", [1], b"\0"))))


def _moved_part(folder: Path, index: dict[str, Any]) -> None:
    """A scale in another file than its codes."""
    home = folder / index["weight_map"]["static.weight.scale"]
    other = next(f for f in sorted(folder.glob("*.safetensors")) if f != home)
    header, data = split(home.read_bytes())
    body = data[slice(*header["static.weight.scale"]["data_offsets"])]
    home.write_bytes(join(*replace_tensor(header, data, "static.weight.scale", None)))
    other.write_bytes(join(*replace_tensor(*split(other.read_bytes()), "static.weight.scale", ("F32", [8, 1], body))))
    index["weight_map"]["static.weight.scale"] = other.name


FOLDERS = {
    "no index": sharded(lambda folder, index: b""),
    "index is no JSON": sharded(lambda folder, index: b"<html>"),
    "index 3000 deep": sharded(lambda folder, index: b'{"weight_map":' + b"[" * 3000 + b"]" * 3000 + b"}"),
    "index with a key twice": sharded(lambda f, i: b'{"weight_map":{"a":"b.safetensors","a":"c.safetensors"}}'),
    "index without weight_map": sharded(lambda folder, index: {"metadata": {}}),
    "weight_map is a list": sharded(lambda folder, index: {"weight_map": ["a"]}),
    "weight_map is empty": sharded(lambda folder, index: {"weight_map": {}}),
    "shard is a number": shard_named(3),
    "shard is a list": shard_named(["model.safetensors"]),
    "shard empty": shard_named(""),
    "shard upward": shard_named("../model.safetensors"),
    "shard absolute": shard_named("/etc/passwd"),
    "shard in a folder": shard_named("sub/model.safetensors"),
    "shard with a backslash": shard_named("..\\model.safetensors"),
    "shard on a drive": shard_named("C:model.safetensors"),
    "shard with NUL": shard_named("a\0.safetensors"),
    "shard is an address": shard_named("https://example.org/model.safetensors"),
    "shard is a pickle": shard_named("model.bin"),
    "shard hidden": shard_named(".safetensors"),
    "shard missing": shard_named("model-00099-of-00099.safetensors"),
    "shard is a link outward": sharded(_link_out),
    "index is a link outward": _index_link_out,
    "shard is a pipe": sharded(_pipe),
    "shard lacks a tensor": sharded(lambda folder, index: index["weight_map"].update({"ghost": _first(folder).name})),
    "shard has one too many": sharded(_extra),
    "tensor in two shards": sharded(_two_homes),
    "part in another shard": sharded(_moved_part),
    "shard truncated": sharded(lambda folder, index: os.truncate(_first(folder), 500)),
    "tensor with a bad name": sharded(lambda folder, index: index["weight_map"].update({"a..b": _first(folder).name})),
    "folder missing": lambda folder: folder / "nowhere",
    "folder empty": lambda folder: folder,
    "path with NUL": lambda folder: folder / "a\0b",
}
