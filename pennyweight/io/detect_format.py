"""pw.open: which format a path is of, and its tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import external_readers
from .checkpoint import INDEX, SINGLE, Checkpoint, open_once, resolve_inside, retry_while_replaced
from .codecs import CODECS
from .config_files import METHOD, folder_of
from .errors import CheckpointError
from .lazy_checkpoint import Opened, open_safetensors
from .meta_model import read_config, read_json

GGUF_MAGIC = b"GGUF"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def open(path: str | os.PathLike[str], *, allow_pickle: bool = False, mmap: bool = True) -> Opened:
    """Open a checkpoint of any format that is known: a folder, a file, or an index. Headers only.

    Safetensors: Pennyweight's own, floats, and those of other libraries, told by config.json and the names of the
    tensors; GGUF files (a folder that holds one and no safetensors will do; of a split one any part). Use the result
    as a mapping from names to tensors, and as a context manager. Names are those of the file. Raises CheckpointError.

    allow_pickle: also read a file of torch.save, with torch.load(weights_only=True). A pickle is a program; torch lets
    it call little, and has been wrong about that before. Only for files of people whom you trust.

    mmap: tensors are mapped from the files, which costs no memory until they are used. Files may be replaced by a
    rename or removed then, as all writers of this library do, but not cut short or written to in place: the next use of
    a tensor would end the process (SIGBUS) or see other numbers. False reads tensors into memory of their own.
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
                path, None, "is a pickle, which can run code: pass allow_pickle=True if you trust whoever made it"
            )
        return external_readers.reader(external_readers.PICKLES).open_pickle(path, mmap)
    checkpoint = open_once(path, mmap)
    try:
        return _safetensors(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


def find_gguf(path: str) -> str | None:
    """The GGUF file that a path means, None where it means none. Raises CheckpointError for a folder with several."""
    if os.path.isfile(path):
        return path if path.endswith(".gguf") or _magic(path) == GGUF_MAGIC else None
    if not os.path.isdir(path) or any(os.path.lexists(os.path.join(path, name)) for name in (SINGLE, INDEX)):
        return None
    real = os.path.realpath(path)
    # of a model in several files the first one stands for all
    names = sorted(n for n in os.listdir(real) if n.endswith(".gguf") and not n.startswith("."))
    firsts = [n for n in names if "-of-" not in n or "-00001-of-" in n]
    if len(firsts) > 1:
        raise CheckpointError(
            path, None, f"holds {len(firsts)} GGUF models ({', '.join(firsts[:4])}); name one of them"
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
        for key, module in external_readers.BY_METADATA.items():
            if any(key in file.metadata for file in c.files):
                plugin = external_readers.reader(module)
                if named not in (None, METHOD, plugin.FORMAT):
                    raise CheckpointError(
                        c.path, None, f"its metadata describe tensors of {plugin.FORMAT}, config.json says "
                        f"quant_method {str(named)[:60]!r}"
                    )  # fmt: skip
                return plugin.open_safetensors(c, config)
        for codec in CODECS:
            if codec.claims(method, entries):
                return open_safetensors(c, codec, method, config)
        if named not in (None, METHOD):
            known = ", ".join(codec.name for codec in CODECS)
            raise CheckpointError(
                c.path, None, f"config.json says quant_method {str(named)[:60]!r}, whose tensors are not found here; "
                f"read are: {known}"
            )  # fmt: skip
    return open_safetensors(c, None, {}, config)


def quantization_of(config: Mapping[str, Any] | None, folder: str) -> Mapping[str, Any]:
    """What a folder says about how its weights are quantized; {} where it says nothing."""
    for key in ("quantization_config", "compression_config"):  # the second: compressed-tensors before 0.5
        method = (config or {}).get(key)
        if isinstance(method, dict):
            return method
        if method is not None:
            raise CheckpointError(
                os.path.join(folder, "config.json"), None, f"{key} must be an object, got {str(method)[:60]!r}"
            )
    older = read_json(folder, "quantize_config.json")  # AutoGPTQ before transformers knew it
    return {} if older is None else {"quant_method": "gptq", **older}
