"""Text: the sources of the interpreter's own standard library, split by file so that nothing leaks.

Bytes are the tokens (0 to 255). A file goes to one split by the SHA-1 of its path in the library, so that the splits do
not depend on the machine; they do depend on the release of Python, whose digest the language model's cache carries.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SPLITS = ("train", "calibration", "validation", "test")
_LARGEST = 400_000  # bytes; larger ones are tables


@lru_cache
def split(name: str) -> bytes:
    """All files of a split, each followed by a newline. Raises KeyError for another name than those in SPLITS."""
    return _read()[name]


@lru_cache
def _read() -> dict[str, bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    kept: dict[str, list[bytes]] = {name: [] for name in SPLITS}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if "site-packages/" in relative or "dist-packages/" in relative or path.stat().st_size >= _LARGEST:
            continue
        text = path.read_bytes()
        if text and text.isascii():
            kept[_split_of(relative)].append(text + b"\n")
    return {name: b"".join(texts) for name, texts in kept.items()}


def _split_of(relative: str) -> str:
    """2.5 % each for calibration and validation, 3.5 % for the test that decides, the rest for training."""
    share = int.from_bytes(hashlib.sha1(relative.encode()).digest()[:4], "big") / 2**32
    return "calibration" if share < 0.025 else "validation" if share < 0.05 else "test" if share < 0.085 else "train"


def digest() -> str:
    """SHA-256 of all splits, first 12 digits."""
    return hashlib.sha256(b"\0".join(split(name) for name in SPLITS)).hexdigest()[:12]


def sequences(name: str, count: int, length: int = 256, seed: int = 0) -> Tensor:
    """int64 [count, length]: windows of a split that do not overlap, in random order."""
    text = torch.frombuffer(bytearray(split(name)), dtype=torch.uint8)
    whole = text[: text.numel() // length * length].view(-1, length)
    if count > whole.shape[0]:
        raise ValueError(f"{name} has {whole.shape[0]} windows of {length} bytes; {count} asked for")
    order = torch.randperm(whole.shape[0], generator=torch.Generator().manual_seed(seed))
    return whole[order[:count]].long()


@lru_cache
def docstrings(name: str) -> tuple[str, ...]:
    """First paragraphs of the docstrings in a split's files, each once, 20 to 300 characters."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if "-packages/" in relative or path.stat().st_size >= _LARGEST or _split_of(relative) != name:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # the library has files that are wrong on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if 20 <= len(text) <= 300 and text.isascii():
                    found[text] = None
    return tuple(found)
