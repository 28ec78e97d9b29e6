"""A GGUF file, or all parts of a split one, as a mapping of tensors, under GGUF or Hugging Face names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..atomic_write import write_bytes
from ..config_files import config_bytes
from ..file import CheckpointError, checkpoint_errors
from ..lazy_checkpoint import Opened, StoredTensor
from ..manifest import Meta
from ..safetensors_file import Entry as Plain
from ..state_dict import from_parts
from ..strict_json import resolve_inside
from .architectures import BY_GGUF
from .config import config_from_kv, experts_of, generation_files, pooling_files
from .experts import in_memory
from .gguf_file import File
from .metadata import Value
from .names import Transform, read_patterns, to_hf
from .rope import ROPE_TENSORS
from .tokenizer_files import tokenizer_files

MAX_SPLITS = 4096


def open_gguf(path: str, first: str, mmap: bool = True) -> Opened:
    """``path`` as given, ``first`` the file it refers to. mmap: see RawFile. Raises CheckpointError."""
    files: list[File] = []

    def close() -> None:
        for file in files:
            file.close()

    try:
        files.append(File(os.path.realpath(first), mmap))
        files += _others(files[0])
        stored: dict[str, StoredTensor] = {}
        for file in files:
            for name in file.entries:
                if name in stored:
                    raise CheckpointError(file.path, name, "is also in another part of the model")
                stored[name] = _held(file, name)
        count = _split(files[0], "split.tensors.count")
        if len(files) > 1 and count not in (None, len(stored)):
            raise CheckpointError(files[0].path, None, f"declares {count} tensors in all parts, found {len(stored)}")
    except BaseException:
        close()
        raise
    metadata = {key: value for key, value in files[0].metadata.items() if not key.startswith("split.")}
    return Opened(path, "gguf", stored, tuple(file.path for file in files), close, {}, metadata)


def _others(first: File) -> list[File]:
    """The other parts of a split model; ``first`` may be any of them."""
    count = _split(first, "split.count")
    if count in (None, 0, 1):
        return []
    number = _split(first, "split.no")
    folder, name = os.path.split(first.path)
    stem, ending = name.removesuffix(".gguf")[:-15], f"-of-{count:05d}"
    if not 1 < count <= MAX_SPLITS or number is None or not 0 <= number < count:
        raise CheckpointError(first.path, None, f"is part {number} of {count}; the maximum is {MAX_SPLITS} parts")
    if name != f"{stem}-{number + 1:05d}{ending}.gguf":
        raise CheckpointError(
            first.path, None, f"is part {number} of {count}, so its name must end in -{number + 1:05d}{ending}"
        )
    files: list[File] = []
    try:
        for i in range(count):
            if i == number:
                continue
            file = File(resolve_inside(folder, f"{stem}-{i + 1:05d}{ending}.gguf"), first.mmap)
            files.append(file)
            if (_split(file, "split.no"), _split(file, "split.count")) != (i, count):
                raise CheckpointError(file.path, None, f"is not declared as part {i} of {count}")
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _split(file: File, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is None:
        return None
    if type(value.data) is not int or value.data < 0:
        raise CheckpointError(file.path, None, f"{key} must be an integer, got {str(value.data)[:40]!r}")
    return value.data


def _held(file: File, name: str) -> StoredTensor:
    e = file.entries[name]
    spec, shape = e.type.spec, e.shape
    kind: Meta | Plain
    if isinstance(spec, torch.dtype):
        kind = Plain(spec, shape, 0, e.end - e.begin)
    else:
        kind = Meta(spec, shape, torch.float32, signed_scale=True)

    def decoded(raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        with checkpoint_errors(file.path, name):
            try:
                stream = e.type.decode_stream(raw, shape)
                parts = e.type.decode(raw, shape) if stream is None else stream
            except ImportError as err:  # the type's codebook needs the gguf package
                raise CheckpointError(file.path, name, str(err)) from err
            if e.type.plain:
                return parts.codes
            return from_parts(name, parts, replace(kind, shape=shape), packed=stream is not None)

    def rows(start: int, stop: int) -> Tensor:
        each = e.rows // shape[0]
        return decoded(file.rows(name, start * each, stop * each), (stop - start, *shape[1:]))

    by_rows = len(shape) > 1 and shape[0] > 0 and (e.type.plain or spec.rows_independent(shape))
    return StoredTensor(
        kind, e.end - e.begin, lambda: decoded(file.mapped(name), shape), rows if by_rows else None, e.type.name
    )


# -- under Hugging Face's names ----------------------------------------------------------------------------------------


def under_hf_names(source: Opened, pattern_file: Any = None) -> Opened:
    """The same tensors as in Hugging Face's model of the architecture: names, row order, config.

    pattern_file: see :func:`.names.read_patterns`. Raises CheckpointError for an architecture or a name that is in
    neither the tables nor the file.
    """
    kv = PlainValues(source.metadata)
    arch = str(kv.get("general.architecture"))
    patterns = None if pattern_file is None else read_patterns(pattern_file)
    with checkpoint_errors(source.path):
        mapped = to_hf(source.held, arch, kv, patterns)
        stored = {
            m.name: moved(source.held[name], m.transform, m.name, to_gguf=False)
            for name, m in mapped.items()
            if m.name is not None
        }
        config = None  # a pattern file only gives names; the config of an unknown architecture stays unknown
        if patterns is None or arch in BY_GGUF:
            tensors = {name: source[name] for name in ROPE_TENSORS if name in source}
            config = config_from_kv(kv, set(source.held), tensors)
        if config is not None and experts_of(config):
            stored = in_memory(stored)
    return replace(source, held=stored, config=config)


class PlainValues(Mapping[str, Any]):
    """Metadata as plain values: numbers, strings, lists. Decoded when asked for: tokens and merges are long lists."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        self._metadata = metadata

    def __getitem__(self, key: str) -> Any:
        data = self._metadata[key].data
        return data if isinstance(data, (int, float, str, list)) else data.tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)


def moved(stored: StoredTensor, transform: Transform, name: str, to_gguf: bool) -> StoredTensor:
    """A tensor with its rows in the order of the other side. Raises ValueError if the transform does not apply."""
    if transform.name == "same":
        return stored

    def change(x: Tensor) -> Tensor:
        with checkpoint_errors(None, name):
            return transform.apply(x, name, to_gguf)

    if not transform.moves_rows_only:
        if stored.meta is not None:
            raise ValueError(f"{name}: is stored as weight + 1 and quantized, so 1 cannot be subtracted from its codes")
        return replace(
            stored, kind=Plain(torch.float32, stored.kind.shape), read=lambda: change(stored.read()), rows=None
        )
    order = transform.row_order(stored.kind.shape[0], to_gguf, name)
    plain_rows = stored.rows
    if order is None or plain_rows is None:
        return replace(stored, read=lambda: change(stored.read()), rows=None)

    def rows(start: int, stop: int) -> Tensor:
        wanted = order[start:stop]
        first, last = int(wanted.min()), int(wanted.max())
        return plain_rows(first, last + 1).index_select(0, wanted - first)

    return replace(stored, read=lambda: change(stored.read()), rows=rows)


def write_side_files(
    source: Opened, dst: str, quantization_config: dict[str, Any] | None, dtype: torch.dtype | None = None,
    *, tokenizer: bool = True,
) -> list[str]:  # fmt: skip
    """Write config.json and the tokenizer files from the metadata. Returns names."""
    kv = PlainValues(source.metadata)
    files = (tokenizer_files(kv)[0] if tokenizer else {}) | pooling_files(kv) | generation_files(kv)
    if source.config is not None:
        files["config.json"] = config_bytes(source.config, quantization_config, dtype)
    for name, data in files.items():
        os.makedirs(os.path.dirname(os.path.join(dst, name)), exist_ok=True)
        write_bytes(os.path.join(dst, name), data)
    return list(files)
