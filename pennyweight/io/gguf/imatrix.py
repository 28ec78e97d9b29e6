"""Importance matrices of llama.cpp: the mean square of each input of each weight, from calibration data.

Two formats are read, the GGUF one is written:

    GGUF   ``general.type`` "imatrix"; for each weight NAME the float32 tensors NAME.in_sum2 [experts, columns], sums of
           squares, and NAME.counts [experts, 1], the tokens summed over (one row where there are no experts)
    .dat   int32 entries; of each: int32 length, name, int32 calls, int32 count, float32 [count] = mean square * calls;
           then optionally int32 chunks, int32 length, data set. Little-endian.

Source: tools/imatrix/imatrix.cpp of llama.cpp (2026).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...algorithms.calibration.batches import each
from ...algorithms.calibration.block_order import inference_mode
from ...algorithms.calibration.input_hooks import Expert, InputHooks, expert_modules, require_finite, without_padding
from ...planning.run_batch import run_batch, token_mask
from ..file import CheckpointError, RawFile, checkpoint_errors
from .blocks import TYPES
from .experts import names_in_memory
from .gguf_file import MAGIC, MAX_TENSORS, File, Writer, check_tensor_name
from .metadata import Value
from .names import to_gguf

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_NAME = 64
_MAX_DATASET = 1 << 16
_FLOOR = 1e-6  # of the mean of a row: a column that calibration never used keeps a little weight


@dataclass(frozen=True)
class Moments:
    """Sums of squares of the inputs of one weight.

    sums    float32 [experts, columns]; one row if the weight has no experts, or if a file does not separate them
    counts  float32 [experts], tokens summed over; 0 for an expert that calibration never reached
    """

    sums: Tensor
    counts: Tensor

    def mean(self) -> Tensor:
        """The mean square, float32 [experts, columns]; ones for an expert without tokens, like in llama.cpp."""
        mean = self.sums / self.counts.clamp(min=1)[:, None]
        mean = torch.where((self.counts > 0)[:, None], mean, 1.0)
        floor = mean.mean(1, keepdim=True) * _FLOOR
        return torch.where(floor > 0, torch.maximum(mean, floor), 1.0)


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix: moments by the name of the weight in a GGUF file, and where they are from.

    chunks, chunk_size: of the text that llama.cpp reads; 0 if unknown.
    """

    moments: Mapping[str, Moments]
    path: str = ""
    chunks: int = 0
    chunk_size: int = 0
    datasets: tuple[str, ...] = field(default=())

    def importance(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Importance of the columns of a weight: float32 [k] for a matrix [n, k], [e, k] for experts [e, n, k]; None
        if there is none. Raises CheckpointError if its size differs."""
        found = self.moments.get(name)
        if found is None:
            return None
        mean = found.mean()
        experts = shape[0] if len(shape) == 3 else 1
        if mean.numel() == experts * shape[-1]:
            mean = mean.reshape(experts, shape[-1])
            return mean if len(shape) == 3 else mean[0]
        if name == "token_embd.weight":  # of another use of the matrix, as llama.cpp allows
            return None
        raise CheckpointError(
            self.path or None, name,
            f"has importance for {mean.numel()} inputs, but the tensor {[*shape]} needs {experts * shape[-1]}: it is "
            "of another model",
        )  # fmt: skip


# -- reading -----------------------------------------------------------------------------------------------------------


def read_imatrix(path: str | os.PathLike[str]) -> Imatrix:
    """An importance matrix of llama.cpp, of either format. Raises CheckpointError naming the file and the tensor."""
    at = os.path.realpath(os.fspath(path))
    with _Start(at) as start:
        magic = start.magic
    if magic == MAGIC:
        with File(at, mmap=False) as file:
            return _from_gguf(file)
    with _Dat(at) as dat:
        return Imatrix(dat.moments, at, dat.chunks, 0, dat.datasets)


class _Start(RawFile):
    def _read_header(self) -> None:
        self.magic = self._read_at(0, min(4, self.size))


def _from_gguf(file: File) -> Imatrix:
    kind = file.metadata.get("general.type")
    if kind is None or kind.data != "imatrix":
        shown = "missing" if kind is None else repr(str(kind.data)[:40])
        raise CheckpointError(file.path, None, f"is not an importance matrix: general.type is {shown}, not 'imatrix'")
    names = [name.removesuffix(_SUMS) for name in file.entries if name.endswith(_SUMS)]
    known = {name + ending for name in names for ending in (_SUMS, _COUNTS)}
    for name in file.entries:
        if name not in known:
            raise CheckpointError(file.path, name, f"expected NAME{_SUMS} and NAME{_COUNTS}")
    moments = {}
    for name in names:
        if name + _COUNTS not in file.entries:
            raise CheckpointError(file.path, name, f"has {_SUMS} without {_COUNTS}")
        sums, counts = (_floats(file, name + ending) for ending in (_SUMS, _COUNTS))
        if sums.ndim not in (1, 2) or not sums.numel():
            raise CheckpointError(file.path, name + _SUMS, f"has shape {[*sums.shape]}; expected [experts, columns]")
        sums, counts = sums.reshape(-1, sums.shape[-1]), counts.reshape(-1)
        if len(counts) != len(sums):
            raise CheckpointError(
                file.path,
                name,
                f"has sums of {len(sums)} experts and counts of {len(counts)}; expected the same number",
            )
        moments[name] = _checked(file.path, name, sums, counts)
    return Imatrix(
        moments, file.path, _number(file, "imatrix.chunk_count"), _number(file, "imatrix.chunk_size"), _datasets(file)
    )


def _floats(file: File, name: str) -> Tensor:
    entry = file.entries[name]
    if entry.type is not TYPES["F32"]:
        raise CheckpointError(file.path, name, f"is {entry.type.name}; expected F32")
    return file.rows(name, 0, entry.rows).reshape(-1).view(torch.float32).reshape(entry.shape).clone()


def _number(file: File, key: str) -> int:
    value = file.metadata.get(key)
    return value.data if value is not None and value.kind == "uint32" else 0


def _datasets(file: File) -> tuple[str, ...]:
    value = file.metadata.get("imatrix.datasets")
    return tuple(value.data) if value is not None and value.kind == "[string]" else ()


def _checked(path: str | None, name: str, sums: Tensor, counts: Tensor) -> Moments:
    for what, x in (("sums of squares", sums), ("counts", counts)):
        bad = int((~x.isfinite() | (x < 0)).sum())
        if bad:
            raise CheckpointError(path, name, f"{bad} of {x.numel()} {what} are negative, NaN or infinite")
    return Moments(sums, counts)


class _Dat(RawFile):
    """A file of the older format, read whole."""

    moments: dict[str, Moments]
    chunks: int
    datasets: tuple[str, ...]

    def _read_header(self) -> None:
        self._at = 0
        with checkpoint_errors(self.path):
            count = self._int("the number of entries")
            if not 0 < count <= MAX_TENSORS or count * 16 > self.size:
                raise ValueError(
                    f"is not an importance matrix: it begins with neither {MAGIC!r} nor a number of entries: {count} "
                    f"in {self.size} bytes"
                )
            self.moments = {}
            for i in range(count):
                self._entry(i)
            self.chunks, self.datasets = 0, ()
            if self._at < self.size:
                self.chunks = max(0, self._int("the number of chunks"))
                length = self._int("the length of the data set's name")
                if not 0 <= length <= min(_MAX_DATASET, self.size - self._at):
                    raise ValueError(f"data set's name of {length} bytes at {self._at}")
                self.datasets = (self._take(length, "the data set").decode(errors="replace"),)
            if self._at != self.size:
                raise ValueError(f"{self.size - self._at} bytes after the last field")

    def _entry(self, i: int) -> None:
        length = self._int(f"entry {i}")
        if not 0 < length <= _MAX_NAME:
            raise ValueError(f"entry {i}: name of {length} bytes; at most {_MAX_NAME} are allowed")
        try:
            name = self._take(length, f"entry {i}").decode()
            check_tensor_name(name)
        except UnicodeDecodeError:
            raise ValueError(f"entry {i}: its name is not UTF-8") from None
        calls, count = self._int(name), self._int(name)
        if name in self.moments:
            raise CheckpointError(self.path, name, "appears twice")
        if count <= 0 or count * 4 > self.size - self._at:
            raise CheckpointError(
                self.path, name, f"declares {count} values, but {self.size - self._at} bytes are left: truncated"
            )
        if calls < 0:
            raise CheckpointError(self.path, name, f"declares {calls} calls")
        raw = torch.frombuffer(bytearray(self._take(4 * count, name)), dtype=torch.float32)
        # zero calls: llama.cpp takes the values as they are
        counts = torch.tensor([max(calls, 1)], dtype=torch.float32, device="cpu")
        self.moments[name] = _checked(self.path, name, raw[None], counts)

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self._at:
            raise ValueError(f"{what}: {count} bytes at {self._at}, but the file ends at {self.size}: truncated")
        self._at += count
        return self._read_at(self._at - count, count)

    def _int(self, what: str) -> int:
        return int(struct.unpack("<i", self._take(4, what))[0])


# -- writing -----------------------------------------------------------------------------------------------------------


def write_imatrix(imatrix: Imatrix, path: str | os.PathLike[str]) -> None:
    """Write the GGUF format. Raises CheckpointError for an invalid name or number, OSError if a write fails."""
    dst = os.path.abspath(os.fspath(path))
    metadata = {
        "general.type": Value("string", "imatrix"),
        "imatrix.datasets": Value("[string]", [*imatrix.datasets]),
        "imatrix.chunk_count": Value("uint32", imatrix.chunks),
        "imatrix.chunk_size": Value("uint32", imatrix.chunk_size),
    }
    tensors: dict[str, Tensor] = {}
    for name, m in sorted(imatrix.moments.items()):
        _checked(dst, name, m.sums, m.counts)
        tensors[name + _SUMS], tensors[name + _COUNTS] = m.sums, m.counts[:, None]
    kind = TYPES["F32"]
    writer = Writer(f"{dst}.partial", metadata, {name: (kind, tuple(t.shape)) for name, t in tensors.items()})
    try:
        for name, tensor in tensors.items():
            writer.put(name, tensor.float().contiguous().view(torch.uint8))
        writer.finish(dst)
    finally:
        writer.close()


# -- from a model ------------------------------------------------------------------------------------------------------


def collect_imatrix(model: nn.Module, batches: Any, config: Mapping[str, Any] | None = None) -> Imatrix:
    """The importance matrix of a model on calibration data, for every matrix that multiplies its inputs.

    model    a model of transformers, or any with its parameter names
    batches  a list of batches: tensors, tuples or dicts of arguments; tokens outside attention_mask do not count
    config   the contents of config.json; default: ``model.config``

    The experts of a mixture are counted one by one. Raises PlanError for a bad batch, ValueError for an unsupported
    architecture and for inputs that are not finite.
    """
    config = model.config.to_dict() if config is None else config  # type: ignore[union-attr, operator]
    weights = {name: p for name, p in model.named_parameters() if p.ndim in (2, 3)}
    sums: dict[str, Tensor] = {}
    counts: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, row: int = 0) -> None:
        require_finite(name, x)
        p, x = weights[name], x.flatten(0, 1)
        if name not in sums:
            rows = p.shape[0] if p.ndim == 3 else 1
            sums[name] = torch.zeros((rows, x.shape[1]), dtype=torch.float64, device="cpu")
            counts[name] = torch.zeros(rows, dtype=torch.float64, device="cpu")
        sums[name][row] += x.square().sum(0, dtype=torch.float64).cpu()
        counts[name][row] += x.shape[0]

    def see_expert(expert: Expert, x: Tensor) -> None:
        see(expert.name, x, expert.index)

    tokens, ids, experts = 0, {id(p): name for name, p in weights.items()}, expert_modules(model).values()
    with inference_mode(model):
        for batch in each(batches, "batches"):
            mask = token_mask(batch)
            with without_padding(experts, mask), InputHooks(ids, see, mask, see_expert=see_expert):
                run_batch(model, batch)
            tokens = max(tokens, *(int(c.max()) for c in counts.values()), 0)
    moments: dict[str, Moments] = {}
    stored = {other: name for name in weights for other in names_in_memory(name)}
    for other, mapped in to_gguf(stored, config).items():
        name = stored[other]
        if mapped.name is not None and name in sums:
            moments[mapped.name] = Moments(sums[name].float(), counts[name].float())
    return Imatrix(moments, chunks=1 if moments else 0, chunk_size=tokens)
