"""Mixtures of experts: GGUF has one tensor [experts, n, k] per projection; Hugging Face has one matrix per expert on
disk, and in memory ``gate_up_proj`` [experts, 2 n, k] (the rows of gate first) and ``down_proj``.

Both forms of Hugging Face are turned into tensors PREFIX.experts.gate_proj.weight, up_proj and down_proj, which the
tables of architectures.py name; files of GGUF are turned into the form in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...core.tensor import AffineQuantizedTensor
from ..file import CheckpointError
from ..lazy_checkpoint import StoredTensor
from ..manifest import Meta
from ..safetensors_file import Entry
from ..state_dict import from_parts

MAX_EXPERTS = 1 << 12
_HALVES = ("gate_proj", "up_proj")
# Mixtral's names on disk
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def stacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors with the experts of each projection as one tensor. Raises CheckpointError for experts that are
    missing or differ."""
    out: dict[str, StoredTensor] = {}
    single: dict[str, dict[int, tuple[str, StoredTensor]]] = {}
    for name, tensor in stored.items():
        name_ = name.replace(".block_sparse_moe.", ".mlp.")
        before, found, after = name_.partition(".experts.")
        parts = after.split(".")
        if not found:
            out[name_] = tensor
        elif len(parts) == 3 and parts[0].isdigit() and len(parts[0]) <= 4 and parts[2] == "weight":
            target = f"{before}.experts.{_MIXTRAL.get(parts[1], parts[1])}.weight"
            out.setdefault(target, tensor)  # keeps the place of the first
            single.setdefault(target, {})[int(parts[0])] = name, tensor
        elif after == "gate_up_proj":
            for i, half in enumerate(_HALVES):
                out[f"{before}.experts.{half}.weight"] = _half(name, tensor, i)
        elif after == "down_proj":
            out[f"{before}.experts.down_proj.weight"] = tensor
        else:
            out[name_] = tensor
    return out | {name: _stack(name, experts) for name, experts in single.items()}


def names_in_memory(name: str) -> tuple[str, ...]:
    """The names under which :func:`stacked` has a parameter of a model."""
    if name.endswith(".experts.gate_up_proj"):
        return tuple(name.removesuffix("gate_up_proj") + f"{half}.weight" for half in _HALVES)
    return (f"{name}.weight",) if name.endswith(".experts.down_proj") else (name,)


def _stack(name: str, experts: Mapping[int, tuple[str, StoredTensor]]) -> StoredTensor:
    count = len(experts)
    missing = next((i for i in range(count) if i not in experts), None)
    if missing is not None or count > MAX_EXPERTS:
        raise CheckpointError(None, name, f"expert {missing} is missing; there are {count}, up to {max(experts)}")
    tensors = [experts[i][1] for i in range(count)]
    kind = tensors[0].kind
    changed = isinstance(kind, Meta) and (kind.axes is not None or kind.perm or kind.pre_scale or kind.act is not None)
    if len(kind.shape) != 2 or changed:
        raise CheckpointError(
            None, experts[0][0], "is an expert with permuted or transposed weights, or quantized inputs, which cannot "
            "be stacked; convert to='float' first"
        )  # fmt: skip
    other = next((i for i in range(count) if _same_kind(tensors[i]) != _same_kind(tensors[0])), None)
    if other is not None:
        raise CheckpointError(
            None, experts[other][0], f"is {tensors[other].shown} {[*tensors[other].kind.shape]}, but expert 0 is "
            f"{tensors[0].shown} {[*kind.shape]}; GGUF stores experts of the same kind and shape only"
        )  # fmt: skip

    def rows(start: int, stop: int) -> Tensor:
        return _joined(name, [t.read() for t in tensors[start:stop]], kind, stack=True)

    whole = _of_shape(kind, (count, *kind.shape))
    return StoredTensor(
        whole, sum(t.nbytes for t in tensors), lambda: rows(0, count), rows, tensors[0].word,
    )  # fmt: skip


def _of_shape(kind: Meta | Entry, shape: tuple[int, ...]) -> Meta | Entry:
    return replace(kind, shape=shape) if isinstance(kind, Meta) else Entry(kind.dtype, shape)


def _same_kind(stored: StoredTensor) -> Meta | Entry:
    """The kind without the place in a file."""
    return _of_shape(stored.kind, stored.kind.shape)


def _joined(name: str, tensors: list[Tensor], kind: Meta | Entry, stack: bool) -> Tensor:
    """Matrices as a stack, or stacks [e, n, k] one below the other."""
    if not isinstance(kind, Meta):
        return torch.stack(tensors) if stack else torch.cat(tensors, 1)
    each = []
    for t in tensors:
        assert isinstance(t, AffineQuantizedTensor)
        each.append(t.plain_parts())
    joined = _apply(each, lambda parts: torch.stack(parts) if stack else torch.cat(parts, 1))
    e, *rest = tensors[0].shape
    shape = (len(tensors), e, *rest) if stack else (e, sum(t.shape[1] for t in tensors), *rest[1:])
    return from_parts(name, joined, replace(kind, shape=shape))


def _apply(each, join):  # type: ignore[no-untyped-def]
    """Parts from the parts of several tensors."""
    out = []
    for parts in zip(*each, strict=True):
        first = parts[0]
        out.append(None if first is None else join(parts) if isinstance(first, Tensor) else _apply(parts, join))
    return type(each[0])(*out)


def _half(name: str, stored: StoredTensor, i: int) -> StoredTensor:
    """Rows [i n, (i + 1) n) of each expert of gate_up_proj."""
    kind = stored.kind
    if len(kind.shape) != 3 or kind.shape[1] % 2:
        raise CheckpointError(None, name, f"has shape {[*kind.shape]}; expected [experts, 2 n, k]")
    if isinstance(kind, Meta) and kind.axes is not None:
        raise CheckpointError(None, name, "is stored transposed, which GGUF does not support; convert to='float' first")
    n = kind.shape[1] // 2

    def cut(x: Tensor) -> Tensor:
        return x[:, i * n : (i + 1) * n]

    plain = stored.rows
    return replace(
        stored,
        kind=_of_shape(kind, (kind.shape[0], n, kind.shape[2])),
        nbytes=stored.nbytes // 2,
        read=lambda: cut(stored.read()),
        rows=None if plain is None else lambda start, stop: cut(plain(start, stop)),
    )


def in_memory(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The inverse of :func:`stacked`, to the form in memory. Raises CheckpointError if gate and up differ in type."""
    out: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        before, found, after = name.partition(".experts.")
        if not found:
            out[name] = tensor
        elif after == "gate_proj.weight":
            out[f"{before}.experts.gate_up_proj"] = _both(name, tensor, stored.get(f"{before}.experts.up_proj.weight"))
        elif after == "down_proj.weight":
            out[f"{before}.experts.down_proj"] = tensor
        elif after != "up_proj.weight":
            out[name] = tensor
    return out


def _both(name: str, gate: StoredTensor, up: StoredTensor | None) -> StoredTensor:
    if up is None or _same_kind(up) != _same_kind(gate) or len(gate.kind.shape) != 3:
        raise CheckpointError(
            None, name, f"is {gate.shown} {[*gate.kind.shape]}, but up_proj "
            + ("is missing" if up is None else f"is {up.shown} {[*up.kind.shape]}")
            + "; the model has both in one tensor [experts, 2 n, k]"
        )  # fmt: skip
    kind, (e, n, k) = gate.kind, gate.kind.shape
    reads = gate.rows, up.rows

    def rows(start: int, stop: int) -> Tensor:
        assert reads[0] is not None
        assert reads[1] is not None
        return _joined(name, [reads[0](start, stop), reads[1](start, stop)], kind, stack=False)

    return replace(
        gate,
        kind=_of_shape(kind, (e, 2 * n, k)),
        nbytes=gate.nbytes + up.nbytes,
        read=lambda: _joined(name, [gate.read(), up.read()], kind, stack=False),
        rows=None if None in reads else rows,
    )
