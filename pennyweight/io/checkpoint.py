"""Opens a checkpoint: one safetensors file, or a folder of shards with an index. Reads headers only, no tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from .file import CheckpointError, checkpoint_errors, no_such_path
from .manifest import KEY, Manifest, check_parts, read, stored_parts
from .safetensors_file import Entry, File, check_name
from .strict_json import read_json, resolve_inside

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROGRESS_ENDING = ".progress.json"  # of the file beside an unfinished job, see resumable_write.py
MAX_INDEX_BYTES = 64 << 20
MAX_SHARDS = 4096
_ATTEMPTS = 64  # to open a checkpoint that writers keep replacing


class _Closable(Protocol):
    @property
    def close(self) -> Callable[[], None]: ...


Opening = TypeVar("Opening", bound=_Closable)


@dataclass
class Checkpoint:
    """Open files with consistent headers and manifests. Use as a context manager."""

    path: str
    files: list[File] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    where: dict[str, int] = field(default_factory=dict)  # stored name -> index of its file
    index: str | None = None  # path of the index

    @property
    def manifest(self) -> Manifest:
        """The manifests of all files, merged."""
        out = Manifest()
        for m in self.manifests:
            out.tensors.update(m.tensors)
            out.aliases.update(m.aliases)
        return out

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files, including the index."""
        return (*(file.path for file in self.files), *([] if self.index is None else [self.index]))

    def entry(self, stored: str) -> Entry:
        return self.files[self.where[stored]].entries[stored]

    def tensor(self, stored: str) -> Tensor:
        """The stored tensor, memory-mapped."""
        return self.files[self.where[stored]].tensor(stored)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def open_checkpoint(path: str | os.PathLike[str], mmap: bool = True) -> Checkpoint:
    """Open a .safetensors file, an index, or a folder that holds model.safetensors or its index.

    mmap: whether tensors are memory-mapped; otherwise each is read into its own memory. Checks everything that the
    headers show. Raises only CheckpointError.
    """
    path = os.fspath(path)
    return retry_while_replaced(path, lambda: open_once(path, mmap))


def retry_while_replaced(path: str, attempt: Callable[[], Opening]) -> Opening:
    """Run ``attempt`` to open a path. Retry if a writer replaced the checkpoint meanwhile.

    Raises the CheckpointError of the last attempt.
    """
    for left in reversed(range(_ATTEMPTS)):
        before = _state(path)
        try:
            found = attempt()
        except CheckpointError:
            if left and _state(path) != before:
                continue
            raise
        if _state(path) == before:
            return found
        found.close()
    raise CheckpointError(path, None, f"was replaced {_ATTEMPTS} times while it was being opened; try again later")


def _state(path: str) -> list[Any]:
    """File metadata that changes when the checkpoint is replaced: of the files a reader opens first."""
    paths = [path]
    if os.path.isdir(path):
        paths += [os.path.join(path, name) for name in (INDEX, SINGLE, "config.json")]
    out: list[Any] = []
    for i, one in enumerate(paths):
        try:
            info = os.stat(one)
        except (OSError, ValueError):
            out.append(None)
            continue
        folder = i == 0 and len(paths) > 1  # a folder's mtime changes with any file in it
        out.append((info.st_dev, info.st_ino, *(() if folder else (info.st_size, info.st_mtime_ns))))
    return out


def _contents(folder: str) -> str:
    """What a folder without a checkpoint contains, with the remedy."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    unfinished = next((name for name in names if name.endswith(PROGRESS_ENDING)), None)
    if unfinished is not None:
        return f"is unfinished, its writer was interrupted ({unfinished}); run the same command again, and it continues"
    neither = f"contains neither {SINGLE} nor {INDEX}"
    weights = [name for name in names if name.endswith((".safetensors", ".gguf", ".bin", ".pt", ".pth"))]
    if weights:
        return f"{neither}; pass the path of a file, such as {os.path.join(folder, weights[0])}"
    some = f"only {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "nothing"
    return f"{neither}; it has {some}: pass the folder or the file with the weights"


def open_once(path: str, mmap: bool) -> Checkpoint:
    """:func:`open_checkpoint` without retries."""
    try:
        real = os.path.realpath(path, strict=True)
        is_dir = os.path.isdir(real)
    except (OSError, ValueError) as e:
        missing = no_such_path(path) if isinstance(e, FileNotFoundError) else ""
        raise CheckpointError(path, None, f"cannot be opened: {getattr(e, 'strerror', None) or e}{missing}") from e
    if is_dir:
        index = os.path.join(real, INDEX)
        if not os.path.lexists(index):
            if not os.path.lexists(os.path.join(real, SINGLE)):
                raise CheckpointError(path, None, _contents(real))
            return _open(path, [resolve_inside(real, SINGLE)], mmap)
        return _open_index(path, real, resolve_inside(real, INDEX), mmap)
    if path.endswith(".index.json"):
        return _open_index(path, os.path.dirname(os.path.abspath(path)), real, mmap)
    return _open(path, [real], mmap)


def open_files(paths: Sequence[str]) -> Checkpoint:
    """Open the given safetensors files as one checkpoint; they may be the links of the Hub's cache. Raises
    CheckpointError."""
    real = [resolve_inside(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in paths]
    out = _open(os.path.dirname(paths[0]) or ".", real, True)
    names = [name for file in out.files for name in file.entries]
    if len(names) > len(out.where):
        out.close()
        twice = next(name for name in out.where if names.count(name) > 1)
        raise CheckpointError(out.path, twice, "is in two files")
    return out


def _open_index(path: str, folder: str, index: str, mmap: bool) -> Checkpoint:
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise CheckpointError(index, None, f"lists {len(names)} shards; the maximum is {MAX_SHARDS}")
    out = _open(path, [resolve_inside(folder, name) for name in names], mmap, names, weight_map)
    out.index = index
    return out


def _open(
    path: str, paths: list[str], mmap: bool, names: list[str] | None = None, weight_map: dict[str, str] | None = None
) -> Checkpoint:
    out = Checkpoint(path)
    try:
        for i, file_path in enumerate(paths):
            file = File(file_path, mmap)
            out.files.append(file)
            if names is not None and weight_map is not None:
                wrong = next((stored for stored in file.entries if weight_map.get(stored) != names[i]), None)
                if wrong is not None:
                    home = weight_map.get(wrong)
                    reason = "not in the index" if home is None else f"is also in {home}"
                    raise CheckpointError(file.path, wrong, reason)
            out.where.update(dict.fromkeys(file.entries, i))
        if weight_map is not None:
            for stored, name in weight_map.items():
                if stored not in out.where:
                    raise CheckpointError(
                        os.path.join(path, name), stored, "listed in the index, but missing from the file"
                    )
        out.manifests = _shared(out) or [_manifest(file) for file in out.files]
        _check_together(out)
    except BaseException:
        out.close()
        raise
    return out


def _shared(c: Checkpoint) -> list[Manifest]:
    """Each file's part of the manifest, if several files all contain the same manifest for the whole checkpoint."""
    if len(c.files) < 2 or len({file.metadata.get(KEY) for file in c.files}) > 1 or KEY not in c.files[0].metadata:
        return []
    whole = _manifest(c.files[0], [e for file in c.files for e in file.entries.items()])
    out = [Manifest() for _ in c.files]
    for name, meta in whole.tensors.items():
        out[c.where[next(iter(stored_parts(name, meta)))]].tensors[name] = meta
    home = {name: i for i, manifest in enumerate(out) for name in manifest.tensors}
    for alias, target in whole.aliases.items():
        out[home[target] if target in home else c.where[target]].aliases[alias] = target
    return out


def _manifest(file: File, entries: Iterable[tuple[str, Entry]] | None = None) -> Manifest:
    with checkpoint_errors(file.path):
        manifest = read(file.metadata)
        entries = file.entries.items() if entries is None else entries
        check_parts(manifest, {name: (e.dtype, e.shape) for name, e in entries})
        return manifest


def _check_together(c: Checkpoint) -> None:
    """Check that no name is defined twice across files."""
    guards = {name for manifest in c.manifests for name, meta in manifest.tensors.items() if meta.guard}
    owner = {name: i for name, i in c.where.items() if name not in guards}
    for i, manifest in enumerate(c.manifests):
        for name in (*manifest.tensors, *manifest.aliases):
            if name in owner:
                raise CheckpointError(
                    c.files[i].path, name, f"is also in {os.path.basename(c.files[owner[name]].path)}"
                )
            owner[name] = i


def read_index(path: str) -> dict[str, str]:
    """weight_map of an index file: stored name -> plain file name. Raises CheckpointError."""
    index = read_json(path, max_bytes=MAX_INDEX_BYTES, max_depth=8)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, None, "weight_map must be an object that maps tensors to files")
    for stored, name in weight_map.items():
        with checkpoint_errors(path, stored):
            check_name(stored)
            check_file_name(name)
    return weight_map


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of a sharded checkpoint, in the Hugging Face format."""
    data = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def check_file_name(name: Any) -> None:
    """Raise ValueError unless ``name`` is a plain file name: no folder, drive, URL or hidden file."""
    plain = isinstance(name, str) and 0 < len(name) <= 255 and name.isprintable() and not set(name) & set('/\\:*?"<>|')
    if not plain or name.startswith(".") or not name.endswith(".safetensors"):
        raise ValueError(f"shard {str(name)[:100]!r} is not the plain name of a .safetensors file in the same folder")
