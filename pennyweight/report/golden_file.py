"""Reads and writes golden.safetensors.

__metadata__        {"format": "pt", "pennyweight_golden": JSON {"version": 1, "kind", "bound", "width", "batches"}}
input.<i>.<name>    tensor, keyword argument of batch i;  input.<i>.<j>, j a number: its j-th positional argument
rows.<i>            int32 [rows];  values.<i> float32 [rows, k];  indices.<i> int32 [rows, k]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..io.atomic_write import partial_path, rename_into_place
from ..io.file import CheckpointError
from ..io.safetensors_file import Entry, File, Writer, place
from ..io.strict_json import parse
from .golden_outputs import FILE, MAX_INPUT_BYTES, SLACK, Golden, finite_bound

KEY = "pennyweight_golden"
MAX_BATCHES = 1024
MAX_BYTES = 4 * MAX_INPUT_BYTES
_KEYS = {"version", "kind", "bound", "width", "batches"}
_OUTPUTS = {"rows": (torch.int32, 1), "values": (torch.float32, 2), "indices": (torch.int32, 2)}


def _path(path: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.fspath(path))
    return os.path.join(path, FILE) if os.path.isdir(path) else path


def write(golden: Golden, path: str | os.PathLike[str]) -> str:
    """Write atomically. Raises CheckpointError for inputs that safetensors cannot store, OSError for disk errors."""
    path = _path(path)
    tensors: dict[str, Tensor] = {}
    for i, inputs in enumerate(golden.inputs):
        named = inputs if isinstance(inputs, Mapping) else {str(j): t for j, t in enumerate(inputs)}
        tensors |= {f"input.{i}.{name}": t for name, t in named.items()}
        for name in _OUTPUTS:
            tensors[f"{name}.{i}"] = getattr(golden, name)[i]
    facts = {
        "version": 1, "kind": golden.kind, "bound": golden.bound, "width": golden.width, "batches": len(golden.inputs),
    }  # fmt: skip
    entries = place({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    folder, name = os.path.split(path)
    with partial_path(folder, name) as stage:
        temp = os.path.join(stage, name)
        writer = Writer(temp, entries, {"format": "pt", KEY: json.dumps(facts, sort_keys=True)})
        try:
            for key, tensor in tensors.items():
                writer.put(key, tensor)
            writer.finish()
        finally:
            writer.close()
        rename_into_place(temp, path)
    return path


def read(path: str | os.PathLike[str]) -> Golden:
    """Read and check everything. Raises CheckpointError."""
    path = _path(path)
    with File(os.path.realpath(path)) as file:
        if file.size > MAX_BYTES:
            raise CheckpointError(path, None, f"{file.size} bytes; golden outputs have at most {MAX_BYTES}")
        facts = _facts(path, file.metadata)
        return _golden(path, facts, file.entries, {n: _whole(file, n) for n in file.entries})


def _whole(file: File, name: str) -> Tensor:
    e = file.entries[name]
    return file.read(name, 0, e.numel).reshape(e.shape)


def _facts(path: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    if KEY not in metadata:
        raise CheckpointError(path, None, f"contains no golden outputs: its metadata has no {KEY!r}")
    try:
        facts = parse(metadata[KEY].encode(), max_bytes=4096, max_depth=4, floats=True)
    except ValueError as e:
        raise CheckpointError(path, None, f"{KEY}: {e}") from e
    if not isinstance(facts, dict) or facts.get("version") != 1:
        raise CheckpointError(path, None, f"{KEY}: this release reads version 1, got {str(facts)[:80]}")
    if facts.keys() != _KEYS:
        raise CheckpointError(path, None, f"{KEY} must have exactly {', '.join(sorted(_KEYS))}")
    if facts["kind"] not in SLACK or not finite_bound(facts["bound"]):
        raise CheckpointError(path, None, f"{KEY}: kind must be one of {', '.join(SLACK)}, bound a positive number")
    for name, most in (("width", 1 << 31), ("batches", MAX_BATCHES)):
        if type(facts[name]) is not int or not 0 < facts[name] <= most:
            raise CheckpointError(path, None, f"{KEY}: {name} must be a whole number from 1 to {most}")
    return facts


def _golden(path: str, facts: dict[str, Any], entries: Mapping[str, Entry], tensors: dict[str, Tensor]) -> Golden:
    count, width = facts["batches"], facts["width"]
    outputs: dict[str, list[Tensor]] = {name: [] for name in _OUTPUTS}
    for i in range(count):
        for name, (dtype, ndim) in _OUTPUTS.items():
            key = f"{name}.{i}"
            if key not in tensors:
                raise CheckpointError(path, key, "is missing")
            if entries[key].dtype != dtype or len(entries[key].shape) != ndim:
                raise CheckpointError(path, key, f"must be {dtype} of {ndim} axes, is {entries[key].dtype}")
            outputs[name].append(tensors.pop(key))
        rows, values, indices = (outputs[name][i] for name in _OUTPUTS)
        if values.shape != indices.shape or len(rows) != len(values) or not 1 <= values.shape[1] <= width:
            shapes = f"{list(rows.shape)}, {list(values.shape)}, {list(indices.shape)}"
            raise CheckpointError(path, f"values.{i}", f"shapes of rows, values and indices do not match: {shapes}")
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(path, f"values.{i}", "contains NaN or inf")
        if bool((rows < 0).any()) or bool(((indices < 0) | (indices >= width)).any()):
            raise CheckpointError(
                path, f"indices.{i}", f"rows and indices must be within the output; its width is {width}"
            )
    if not any(len(rows) for rows in outputs["rows"]):
        raise CheckpointError(path, "rows.0", "no row of outputs is stored")
    inputs = _inputs(path, count, tensors)
    at_rows, values_of, indices_of = (tuple(outputs[name]) for name in _OUTPUTS)
    return Golden(facts["kind"], inputs, at_rows, values_of, indices_of, width, float(facts["bound"]))


def _inputs(path: str, count: int, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """The inputs of each batch: all remaining tensors."""
    found: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition(".")
        number, _, name = rest.partition(".")
        known = kind == "input" and number in {str(i) for i in range(count)}
        if not known or not (name.isidentifier() or (name.isascii() and name.isdecimal())):
            raise CheckpointError(path, key, f"is not an input of one of the {count} batches")
        found[int(number)][name] = tensor
    out: list[Any] = []
    for i, named in enumerate(found):
        if not named:
            raise CheckpointError(path, f"input.{i}", "is missing")
        order = [str(j) for j in range(len(named))]
        if named.keys() == set(order):
            out.append(tuple(named[j] for j in order))
        elif all(name.isidentifier() for name in named):
            out.append(named)
        else:
            raise CheckpointError(path, f"input.{i}", f"arguments must be numbered 0 to {len(named) - 1}, or be named")
    return tuple(out)
