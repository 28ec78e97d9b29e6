"""Codec: reads and writes another library's quantized tensors in safetensors; and what codecs share.

Reading converts stored tensors to plain parts and a spec without loss; writing is the inverse. A codec first sees
names, dtypes and shapes, and may read small descriptive data: a shape, a channel order, a table, a JSON text, each
checked to be small. Codes and scales are read when the tensor is accessed. Its output is validated like the native
format's parts: dtypes, shapes, finite scales, codes in range (io/validate.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.numerics import Parts
from ...core.packing import pack_bits, unpack_bits
from ...core.spec import QuantSpec
from ..file import KeyedError
from ..manifest import Meta, Stored
from ..safetensors_file import Entry

Get = Callable[[str], Tensor]  # stored name -> tensor, mapped from the file
Config = Mapping[str, Any]  # quantization_config of config.json
Entries = Mapping[str, Entry]  # stored tensors


@dataclass(frozen=True)
class Found:
    """A quantized tensor in a file.

    meta    its Meta; ``signed_scale`` and ``perm`` may be wrong, they are derived from the parts
    stored  all its stored tensors, including auxiliary ones without values
    parts   reads the plain parts in stored order (the contracted axis last), codes padded to whole blocks.
            Raises ValueError for invalid stored data.
    """

    meta: Meta
    stored: tuple[str, ...]
    parts: Callable[[Get], Parts]


@dataclass(frozen=True)
class Writing:
    """The write functions of a codec.

    refuses  why a tensor cannot be stored exactly, in one sentence; None if it can
    nearest  the spec used instead for a rejected tensor; None: it becomes float
    stored   names, dtypes and shapes that a tensor stores
    pack     stored tensors from plain parts
    method   ``quantization_config`` of config.json for all quantized tensors; ``plain``: weights of linear layers that
             stay float
    perm     whether the format stores a channel permutation (``Meta.perm``); otherwise such a tensor is requantized
    """

    refuses: Callable[[str, Meta], str | None]
    nearest: Callable[[str, Meta], QuantSpec | None]
    stored: Callable[[str, Meta], Stored]
    pack: Callable[[str, Parts, Meta], dict[str, Tensor]]
    method: Callable[[Mapping[str, Meta], tuple[str, ...]], dict[str, Any]]
    perm: bool = False


@dataclass(frozen=True)
class Codec:
    """One format.

    name    its name in ``pennyweight inspect`` and ``convert --to``
    claims  whether a checkpoint has this format, from ``quantization_config`` of config.json ({} if missing) and the
            stored tensors
    find    the quantized tensors by parameter name. Raises KeyedError naming the tensor, or ValueError, if names,
            dtypes, shapes and config are inconsistent; reads only small descriptive data
    oracle  reference implementation used in the tests: package and version
    """

    name: str
    claims: Callable[[Config, Entries], bool]
    find: Callable[[Entries, Config, Get], dict[str, Found]]
    oracle: str
    writing: Writing | None = None


# -- checks of names, dtypes, shapes and config, before any data is read -----------------------------------------------

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def need(
    name: str, entries: Entries, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...],
    owner: str | None = None,
) -> Entry:  # fmt: skip
    """The entry of a stored tensor. Raises KeyedError unless its dtype and shape are among those given, if any.

    owner: the quantized tensor to report in the error, if it is not ``name`` itself.
    """
    entry, prefix = entries.get(name), "" if owner is None else f"{name} "
    if entry is None:
        raise KeyedError(owner or name, f"{prefix}is missing")
    if entry.dtype not in dtypes or (shapes and entry.shape not in shapes):
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        sizes = " or ".join(str(list(s)) for s in shapes)
        got = f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)[:8]}"
        raise KeyedError(owner or name, f"{prefix}is {got}, expected {kinds} {sizes}".rstrip())
    return entry


def stored_text(name: str, entries: Entries, get: Get, max_bytes: int, owner: str) -> bytes:
    """A text stored as a tensor of bytes. Raises KeyedError for the tensor ``owner``."""
    shape = need(name, entries, (torch.uint8,), owner=owner).shape
    if len(shape) != 1 or shape[0] > max_bytes:
        raise KeyedError(owner, f"{name} is {list(shape)[:8]}, expected a text of at most {max_bytes} bytes")
    return bytes(get(name).tolist())


def no_left_overs(entries: Entries, owned: Collection[str], ends: tuple[str, ...], what: str) -> None:
    """Raise KeyedError for a tensor whose name has the suffix of a quantized tensor's part, but that no tensor uses."""
    for name in sorted(entries):
        if name.endswith(ends) and name not in owned:
            raise KeyedError(name, f"is unexpected: no {what} uses it")


def setting(
    config: Config, key: str, kinds: type | tuple[type, ...], default: Any = None,
    what: str = "quantization_config",
) -> Any:  # fmt: skip
    """``config[key]``, or the default if missing or null. Raises ValueError for another type."""
    value, kinds = config.get(key), kinds if isinstance(kinds, tuple) else (kinds,)
    if value is None:
        return default
    if type(value) not in kinds:  # not isinstance: True is also an int
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{what}: {key} must be {names}, got {str(value)[:60]!r}")
    return value


def model_dtype(entries: Entries, quantized: Collection[str]) -> torch.dtype | None:
    """The dtype of most unquantized elements, which is the model's compute dtype. None if there are none."""
    counts = dict.fromkeys(FLOATS, 0)
    for name, entry in entries.items():
        if entry.dtype in counts and name not in quantized:
            counts[entry.dtype] += entry.numel
    best = max(counts, key=lambda dtype: counts[dtype])
    return best if counts[best] else None


def join(layer: str, ending: str) -> str:
    """The stored name of a layer's tensor; the layer name is empty if the model is itself a layer."""
    return f"{layer}.{ending}" if layer else ending


def by_layer(entries: Entries, endings: Collection[str]) -> dict[str, dict[str, str]]:
    """{layer: {ending: stored name}} of the stored tensors whose last name part is one of ``endings``."""
    out: dict[str, dict[str, str]] = {}
    for name in entries:
        layer, _, ending = name.rpartition(".")
        if ending in endings:
            out.setdefault(layer, {})[ending] = name
    return out


# -- codes in 32-bit words, least significant bits first ---------------------------------------------------------------

# dense     a row is one bit stream: code i has bits [i*b, (i+1)*b), across words. compressed-tensors 0.20, GPTQ.
# by word   a word has 32 // b whole codes; with 3, 5, 6 or 7 bits its highest bits are unused. Older releases.
# With 1, 2, 4 and 8 bits the two layouts are identical.


def dense_words(n: int, bits: int) -> int:
    return -(-n * bits // 32)


def whole_words(n: int, bits: int) -> int:
    return -(-n // (32 // bits))


def is_dense(words: int, n: int, bits: int) -> bool | None:
    """Layout of n codes of a row in that many words; dense if both are possible; None if neither is."""
    return True if words == dense_words(n, bits) else False if words == whole_words(n, bits) else None


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [.., n] -> int32 words [.., ceil(n * bits / 32)], dense; unused bits are zero."""
    n = codes.shape[-1]
    stream = pack_bits(codes, bits)
    missing = 4 * dense_words(n, bits) - stream.shape[-1]
    padded = torch.nn.functional.pad(stream, (0, missing))
    return (
        padded.reshape(-1).view(torch.int32).reshape(*codes.shape[:-1], -1)
    )  # view() checks strides of single rows too


def unpack_words(words: Tensor, bits: int, n: int, dense: bool) -> Tensor:
    """int32 words -> uint8 codes [.., n]."""
    if dense or 32 % bits == 0:
        if words.stride(-1) != 1:  # view() checks the stride of a single column, which contiguous() ignores
            words = words.clone(memory_format=torch.contiguous_format)
        return unpack_bits(words.contiguous().view(torch.uint8), bits, n)[..., :n].contiguous()
    mask = (1 << bits) - 1
    codes = torch.stack([(words >> (bits * j) & mask).to(torch.uint8) for j in range(32 // bits)], -1)
    return codes.flatten(-2)[..., :n].contiguous()


# -- blocks that cover consecutive elements, regardless of rows --------------------------------------------------------


def run_block(shape: tuple[int, ...], size: int) -> tuple[blocks.Block, bool]:
    """Our block for a run of ``size`` elements of a row-major tensor, and True.

    If runs do not align with rows: the gcd of both, where several blocks share a scale, and False.
    """
    row, count = shape[-1], math.prod(shape)
    if count <= size:
        return None, True
    if row % size == 0:
        return (size,), True
    if size % row == 0 and (math.prod(shape[:-2]) == 1 or shape[-2] % (size // row) == 0):
        return (size // row, row), True
    return (math.gcd(size, row),), False


def spread_runs(part: Tensor, size: int, block: blocks.Block, shape: tuple[int, ...]) -> Tensor:
    """A part with one number per run [runs], in our shape: reshaped, or repeated over the blocks of a run."""
    part_shape = blocks.counts(block, shape)
    count = math.prod(part_shape)
    if count != len(part):
        part = part.repeat_interleave(size // blocks.resolve(block, shape)[-1])[:count]
    return part.reshape(part_shape).contiguous()
