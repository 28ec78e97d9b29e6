"""Tensors under GGUF and Hugging Face names: the names of both sides, and the transforms of values between them.

Every name maps to a name on the other side, or to the reason why it is left out; an unknown name is an error. The names
come from the tables of architectures.py and from pattern files. Source of the transforms: llama.cpp's converter
(conversion/llama.py, conversion/gemma.py, 2026); the tests compare with transformers' GGUF reader."""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import resolve
from ...core.tensor import AffineQuantizedTensor
from ..file import CheckpointError
from .architectures import BY_GGUF, BY_MODEL_TYPE, OWN_FILE, Architecture, for_config, for_gguf

TRANSFORMS = ("same", "rotary", "plus_one")


@dataclass(frozen=True)
class Transform:
    """A named transform, with the number of attention heads if needed.

    "same"      nothing
    "rotary"    reorders rows: Hugging Face keeps the two halves of a head apart, rotating row i with row
                i + head_dim/2; llama.cpp's "llama" interleaves them
    "plus_one"  w + 1 in GGUF: Gemma multiplies by 1 + w, llama.cpp by the stored value
    """

    name: str = "same"
    heads: int = 0

    def __post_init__(self) -> None:
        if self.name not in TRANSFORMS:
            raise ValueError(f"unknown transform {self.name!r}; known: {', '.join(TRANSFORMS)}")
        if self.name == "rotary" and (type(self.heads) is not int or self.heads <= 0):
            raise ValueError(f"rotary needs a positive number of heads, got {self.heads!r}")

    def to_gguf(self, x: Tensor, name: str = "tensor") -> Tensor:
        """x as stored in GGUF. Quantized tensors stay quantized, bit for bit. Raises ValueError naming the tensor."""
        return self.apply(x, name, True)

    def from_gguf(self, x: Tensor, name: str = "tensor") -> Tensor:
        """The inverse of :meth:`to_gguf`."""
        return self.apply(x, name, False)

    def apply(self, x: Tensor, name: str, to_gguf: bool) -> Tensor:
        """:meth:`to_gguf` or :meth:`from_gguf`."""
        if self.name == "same":
            return x
        if self.name == "plus_one":
            if isinstance(x, AffineQuantizedTensor):
                raise ValueError(
                    f"{name}: a norm is stored as weight + 1, but its codes cannot represent that; dequantize it"
                )
            # float32, as llama.cpp's converter does: bfloat16 + 1 would lose most of a small weight
            return x.float() + (1 if to_gguf else -1)
        order = self.row_order(x.shape[0], to_gguf, name)
        assert order is not None
        if isinstance(x, AffineQuantizedTensor):
            size = x.axes is None and resolve(x.spec.block, x.stored_shape)[0]
            if size not in (1, x.shape[0]):
                raise ValueError(
                    f"{name}: its rows share scales in blocks ({x.spec}), so they cannot be reordered exactly; "
                    "dequantize it first, or quantize with blocks along the last axis"
                )
        return x.index_select(0, order.to(x.device))

    def row_order(self, n_rows: int, to_gguf: bool, name: str = "tensor") -> Tensor | None:
        """int64 [n_rows]: row i of the result is row order[i] of the source; None if the order does not change.

        Raises ValueError if the rows are not whole heads of an even size.
        """
        if self.name != "rotary":
            return None
        if n_rows % (2 * self.heads):
            raise ValueError(
                f"{name}: {n_rows} rows are not {self.heads} heads of an even size; "
                "check the numbers of heads in the config"
            )
        half = n_rows // self.heads // 2
        shape = (self.heads, 2, half) if to_gguf else (self.heads, half, 2)
        return torch.arange(n_rows, dtype=torch.int64, device="cpu").view(shape).transpose(1, 2).reshape(-1)

    @property
    def moves_rows_only(self) -> bool:
        """Whether rows are copied unchanged, so that any stored form of a row can be reordered."""
        return self.name != "plus_one"


SAME = Transform()


MAX_PATTERN_BYTES = 1 << 18
MAX_PATTERNS = 4096
MAX_PATTERN = 300  # characters; names in GGUF have at most 63
MAX_DIGITS = 6
SUFFIXES = (".weight", ".bias")
TIED = "is tied to the embedding matrix (tie_word_embeddings)"


@dataclass(frozen=True)
class Mapped:
    """A mapped tensor: its name on the other side and the transform of its values; or why it is left out."""

    name: str | None
    transform: Transform = SAME
    note: str = ""


@dataclass(frozen=True)
class Patterns:
    """A pattern file: pairs of a GGUF and a Hugging Face pattern, and patterns of tensors to leave out."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def to_hf(
    gguf_names: Iterable[str], arch: str, kv: Mapping[str, Any], patterns: Patterns | None = None
) -> dict[str, Mapped]:
    """GGUF name -> Hugging Face tensor, for all names, in their order.

    arch: ``general.architecture``; kv: the metadata, for the numbers of heads. Raises ValueError for an unsupported
    architecture without patterns, and for an unknown name.
    """
    alone = patterns is not None and bool(patterns.tensors) and arch not in BY_GGUF
    found = None if alone else for_gguf(arch)
    heads = {k: kv.get(f"{arch}.attention.{n}") for k, n in (("q", "head_count"), ("k", "head_count_kv"))}
    if heads["k"] is None:
        heads["k"] = heads["q"]
    table = _Table(found, patterns or Patterns(), to_gguf=False)
    return _mapped(gguf_names, table, heads, f"GGUF architecture {arch!r}")


def to_gguf(hf_names: Iterable[str], config: Mapping[str, Any], patterns: Patterns | None = None) -> dict[str, Mapped]:
    """Hugging Face name -> GGUF tensor, for all names, in their order. config: the contents of config.json."""
    kind = config.get("model_type")
    alone = patterns is not None and bool(patterns.tensors) and str(kind) not in BY_MODEL_TYPE
    found = None if alone else for_config(config)
    q = config.get("num_attention_heads")
    k = config.get("num_key_value_heads")
    table = _Table(found, patterns or Patterns(), to_gguf=True, tied=tied(config) if found else False)
    return _mapped(hf_names, table, {"q": q, "k": q if k is None else k}, f"model_type {kind!r}")


def tied(config: Mapping[str, Any]) -> bool:
    """Whether the model's output matrix is tied to its embedding matrix."""
    value = config.get("tie_word_embeddings")
    return for_config(config).tied if value is None else bool(value)


def read_patterns(path: str | os.PathLike[str]) -> Patterns:
    """Read a pattern file. Raises CheckpointError.

    TOML with a table ``[tensors]`` of lines ``"blk.{i}.foo.weight" = "model.layers.{i}.foo.weight"``, GGUF on the left;
    ``{i}`` stands for an integer between dots, equally often on both sides. Patterns override the built-in rows for the
    same names, but keep their row reordering. ``left_out = ["pattern", ...]`` before it lists tensors to leave out.
    """
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_PATTERN_BYTES + 1)
        if len(data) > MAX_PATTERN_BYTES:
            raise ValueError(f"a pattern file of more than {MAX_PATTERN_BYTES} bytes")
        return _parsed(tomllib.loads(data.decode("utf-8")))
    except RecursionError as e:
        raise CheckpointError(path, None, "TOML nested too deep") from e
    except (OSError, ValueError) as e:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(path, None, str(e)) from e


def _parsed(data: Mapping[str, Any]) -> Patterns:
    unknown = data.keys() - {"tensors", "left_out"}
    if unknown:
        raise ValueError(f"unknown {sorted(unknown)[0][:100]!r}; a pattern file has [tensors] and left_out")
    tensors, left_out = data.get("tensors", {}), data.get("left_out", [])
    if not isinstance(tensors, dict) or not isinstance(left_out, list):
        raise ValueError("[tensors] must be a table and left_out a list of patterns")
    if len(tensors) + len(left_out) > MAX_PATTERNS:
        raise ValueError(f"{len(tensors) + len(left_out)} patterns; the maximum is {MAX_PATTERNS}")
    for pattern in (*tensors, *tensors.values(), *left_out):
        _check(pattern)
    for gguf, hf in tensors.items():
        if gguf.count("{i}") != hf.count("{i}"):
            raise ValueError(f"{gguf!r} = {hf!r}: both sides must have the same number of {{i}}")
    twice = [hf for hf, n in Counter(tensors.values()).items() if n > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} appears twice on the right; each tensor has one name")
    return Patterns(dict(tensors), tuple(left_out))


def _check(pattern: Any) -> None:
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN or not pattern.isprintable():
        raise ValueError(f"{str(pattern)[:100]!r} is not a pattern: expected 1 to {MAX_PATTERN} printable characters")
    parts = pattern.split(".")
    if any(("{" in p or "}" in p) and p != "{i}" for p in parts):
        raise ValueError(f"{pattern!r}: the only placeholder is {{i}}, alone between dots, for an integer")
    if "{i}" in parts and any(_integer(p) for p in parts):
        raise ValueError(f"{pattern!r}: write {{i}} for all integers of a name or for none")


def _integer(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) <= MAX_DIGITS


def _split(name: str) -> tuple[str, list[str]]:
    """A name with {i} in place of its integers, and the integers."""
    parts = name.split(".")
    return ".".join("{i}" if _integer(p) else p for p in parts), [p for p in parts if _integer(p)]


def _filled(pattern: str, integers: Iterable[str]) -> str:
    left = iter(integers)
    return ".".join(next(left) if p == "{i}" else p for p in pattern.split("."))


class _Table:
    """Maps each pattern of one side to (pattern on the other side, transform), or to a reason."""

    def __init__(self, arch: Architecture | None, patterns: Patterns, *, to_gguf: bool, tied: bool = False) -> None:
        self.arch, self.to_gguf = arch, to_gguf
        rows = {
            row.gguf + suffix: (row.hf + suffix, row.transform)
            for row in (arch.rows if arch else ())
            for suffix in SUFFIXES
        }
        own = set(patterns.tensors.values())
        rows = {g: (h, t) for g, (h, t) in rows.items() if h not in own or g in patterns.tensors}
        rows |= {g: (h, rows[g][1] if g in rows else "same") for g, h in patterns.tensors.items()}
        self.rows = {h: (g, t) for g, (h, t) in rows.items()} if to_gguf else rows
        self.left_out: dict[str, str] = {}
        if arch:
            self.left_out |= arch.left_out_hf if to_gguf else arch.left_out_gguf
            if to_gguf and tied and arch.head:
                self.rows.pop(arch.head, None)
                self.left_out[arch.head] = TIED
        self.left_out = {k: v for k, v in self.left_out.items() if k not in self.rows}
        self.left_out |= dict.fromkeys(patterns.left_out, "is left out by the pattern file")
        for pattern in patterns.left_out:
            self.rows.pop(pattern, None)

    def spellings(self, name: str) -> Iterator[str]:
        """The name, and its variants in the model that the table describes."""
        yield name
        if self.arch and self.to_gguf:
            for prefix in self.arch.prefixes:
                if name.startswith(prefix):
                    yield name[len(prefix) :]
            if self.arch.base:
                yield self.arch.base + name

    def find(self, name: str) -> tuple[str, str, list[str]] | str | None:
        """(pattern on the other side, transform, integers of the name), a reason, or None."""
        if "{" in name:  # never a valid name; it would look like a pattern
            return None
        for spelling in self.spellings(name):
            pattern, integers = _split(spelling)
            for key in (spelling, pattern):
                if key in self.left_out:
                    return self.left_out[key]
                if key in self.rows:
                    return *self.rows[key], integers
        return None


def _mapped(names: Iterable[str], table: _Table, heads: Mapping[str, Any], where: str) -> dict[str, Mapped]:
    out: dict[str, Mapped] = {}
    taken: dict[str, str] = {}
    for name in names:
        found = table.find(name)
        if found is None:
            raise ValueError(f"{_shown(name)}: no tensor of {where[:120]} has this name; add it to {OWN_FILE[3:]}")
        if isinstance(found, str):
            out[name] = Mapped(None, note=found)
            continue
        pattern, transform, integers = found
        other = _filled(pattern, integers)
        if other in taken:
            raise ValueError(f"{_shown(name)} and {_shown(taken[other])} both map to {_shown(other)}")
        taken[other] = name
        out[name] = Mapped(other, _transform(transform, heads, integers, name))
    return out


def _transform(kind: str, heads: Mapping[str, Any], integers: list[str], name: str) -> Transform:
    if not kind.startswith("rotary_"):
        return Transform(kind)
    n = heads[kind.removeprefix("rotary_")]
    if isinstance(n, list):  # one number per layer
        layer = int(integers[0]) if integers else 0
        n = n[layer] if layer < len(n) else None
    if type(n) is not int or n <= 0:
        raise ValueError(
            f"{_shown(name)}: its rows are ordered by attention heads, but their number is unknown ({str(n)[:50]}); "
            "set <architecture>.attention.head_count in GGUF, or num_attention_heads in config.json"
        )
    return Transform("rotary", n)


def _shown(name: str) -> str:
    return (name if name.isprintable() else ascii(name))[:200]
