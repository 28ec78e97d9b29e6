"""Codec: reads and writes another library's quantized tensors in safetensors.

Reading converts stored tensors to plain parts and a spec without loss; writing is the inverse. A codec first sees
names, dtypes and shapes, and may read small descriptive data: a shape, a channel order, a table, a JSON text, each
checked to be small. Codes and scales are read when the tensor is accessed. Its output is validated like the native
format's parts: dtypes, shapes, finite scales, codes in range (io/validate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...core.numerics import Parts
from ...core.spec import QuantSpec
from ..manifest import Meta, Stored
from ..safetensors_file import Entry

Get = Callable[[str], Tensor]  # stored name -> tensor, mapped from the file


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
    claims: Callable[[Mapping[str, Any], Mapping[str, Entry]], bool]
    find: Callable[[Mapping[str, Entry], Mapping[str, Any], Get], dict[str, Found]]
    oracle: str
    writing: Writing | None = None
