"""pw.open: detects the format of a path and opens its tensors lazily; the folder with its config and tokenizer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.model_arguments import check_arguments
from .checkpoint import INDEX, SINGLE, Checkpoint, open_once, retry_while_replaced
from .codecs import CODECS
from .config_files import METHOD, folder_of, read_config, read_side_json
from .file import CheckpointError, no_such_path
from .lazy_checkpoint import Opened, open_safetensors
from .strict_json import resolve_inside

GGUF_MAGIC = b"GGUF"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
TORCHAO_KEY = "tensor_names"  # in the metadata of its safetensors files


@check_arguments()
def open(path: str | os.PathLike[str], *, allow_pickle: bool = False, mmap: bool = True) -> Opened:
    """Open a checkpoint of any supported format: a folder, a file, or an index. Reads headers only.

    Safetensors: Pennyweight's format, floats, and formats of other libraries, detected from config.json and tensor
    names. GGUF: one file, a folder with one GGUF model and no safetensors, or any part of a split model. The result is
    a mapping from tensor names (as in the file) to tensors, and a context manager. Raises CheckpointError.

    allow_pickle: also read torch.save files, with torch.load(weights_only=True). Unpickling can run code; torch
    restricts it, but has had security bugs. Use it only with files from sources you trust.

    mmap: tensors are memory-mapped and take no memory until used. Mapped files may be replaced by a rename or removed,
    as all writers of this library do, but not truncated or written in place: the next access to a tensor would end the
    process (SIGBUS) or see changed data. False reads tensors into their own memory.

    >>> import tempfile, torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    >>> report = pw.quantize_(model, "int8")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pw.save(model, folder)
    ...     with pw.open(folder) as checkpoint:
    ...         print(checkpoint.format, sorted(checkpoint), list(checkpoint.quantized))
    pennyweight ['0.bias', '0.weight'] ['0.weight']
    """
    path = os.fspath(path)
    return retry_while_replaced(path, lambda: _open(path, allow_pickle, mmap))


def _open(path: str, allow_pickle: bool, mmap: bool) -> Opened:
    gguf = find_gguf(path)
    if gguf is not None:
        from .gguf.reader import open_gguf

        return open_gguf(path, gguf, mmap)
    if path.endswith(PICKLES) and os.path.isfile(path):
        if not allow_pickle:
            raise CheckpointError(
                path, None, "is a pickle, which can run code: pass allow_pickle=True if you trust its source"
            )
        from .codecs.torchao import reading  # also reads plain state dicts

        return reading.open_pickle(path, mmap)
    checkpoint = open_once(path, mmap)
    try:
        return _safetensors(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def find_gguf(path: str) -> str | None:
    """The GGUF file of a path, or None if there is none. Raises CheckpointError for a folder with several models."""
    if os.path.isfile(path):
        return path if path.endswith(".gguf") or _magic(path) == GGUF_MAGIC else None
    if not os.path.isdir(path) or any(os.path.lexists(os.path.join(path, name)) for name in (SINGLE, INDEX)):
        return None
    real = os.path.realpath(path)
    # a split model is represented by its first file
    names = sorted(n for n in os.listdir(real) if n.endswith(".gguf") and not n.startswith("."))
    firsts = [n for n in names if "-of-" not in n or "-00001-of-" in n]
    if len(firsts) > 1:
        raise CheckpointError(
            path, None, f"contains {len(firsts)} GGUF models ({', '.join(firsts[:4])}); pass the path of one"
        )
    return resolve_inside(real, firsts[0]) if firsts else None


def _magic(path: str) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb", buffering=0) as f:
            return f.read(4)
    except OSError as e:
        raise CheckpointError(path, None, f"cannot be read: {e.strerror}") from e


def _safetensors(c: Checkpoint) -> Opened:
    folder = folder_of(c.path)
    config = read_config(folder)
    method = quantization_of(config, folder)
    entries = {name: c.entry(name) for name in c.where}
    if not c.manifest.tensors:
        named = method.get("quant_method")
        if any(TORCHAO_KEY in file.metadata for file in c.files):
            if named not in (None, METHOD, "torchao"):
                raise CheckpointError(
                    c.path, None, f"its metadata describe tensors of torchao, config.json says "
                    f"quant_method {str(named)[:60]!r}"
                )  # fmt: skip
            from .codecs.torchao import reading

            return reading.open_safetensors(c, config)
        for codec in CODECS:
            if codec.claims(method, entries):
                return open_safetensors(c, codec, method, config)
        if named not in (None, METHOD):
            known = ", ".join(codec.name for codec in CODECS)
            raise CheckpointError(
                c.path, None, f"config.json says quant_method {str(named)[:60]!r}, but its tensors were not found; "
                f"supported: {known}"
            )  # fmt: skip
    return open_safetensors(c, None, {}, config)


def quantization_of(config: Mapping[str, Any] | None, folder: str) -> Mapping[str, Any]:
    """The quantization config of a folder; {} if there is none."""
    for key in ("quantization_config", "compression_config"):  # the second one: compressed-tensors before 0.5
        method = (config or {}).get(key)
        if isinstance(method, dict):
            return method
        if method is not None:
            raise CheckpointError(
                os.path.join(folder, "config.json"), None, f"{key} must be an object, got {str(method)[:60]!r}"
            )
    older = read_side_json(folder, "quantize_config.json")  # AutoGPTQ before its transformers integration
    return {} if older is None else {"quant_method": "gptq", **older}


@contextmanager
def model_folder(path: str, *, tokenizer: bool = True) -> Iterator[str]:
    """The folder from which transformers reads config.json and the tokenizer of a checkpoint: its own, or for a GGUF
    file one with those of its metadata.

    path   a folder, a file in one, or a GGUF file. The metadata of a GGUF file are written to a temporary folder, which
           is removed at the end; in a folder with a GGUF file and a config.json, config.json is used.
    tokenizer  whether the tokenizer is read: its files are the larger part of the metadata

    Raises CheckpointError if there is no such path or the metadata describe no model that transformers has.
    """
    with opened_model_folder(path, tokenizer=tokenizer) as (folder, _):
        yield folder


@contextmanager
def opened_model_folder(path: str, *, tokenizer: bool = True) -> Iterator[tuple[str, Opened | None]]:
    """The same, and for a GGUF file whose metadata were written its tensors under Hugging Face's names."""
    if not os.path.lexists(path):
        raise CheckpointError(path, None, f"there is no such file or folder{no_such_path(path)}")
    found = find_gguf(path)
    if found is None or (os.path.isdir(path) and os.path.lexists(os.path.join(path, "config.json"))):
        yield folder_of(path), None
        return
    from .gguf.reader import open_gguf, under_hf_names, write_side_files

    with open_gguf(path, found) as source, tempfile.TemporaryDirectory() as folder:
        named = under_hf_names(source)
        write_side_files(named, folder, None, tokenizer=tokenizer)
        yield folder, named
