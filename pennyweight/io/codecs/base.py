"""Codec: how another library keeps quantized tensors in safetensors, as data: what to look for, and two directions.

Reading turns stored tensors into plain parts and a spec without loss; writing is its inverse. A codec sees names,
dtypes and shapes first, and reads what describes a tensor: a shape, an order of channels, a table, a JSON text, each
known to be small before it is read. Codes and scales are read when the tensor is asked for. What it gives is checked as
the native format's own parts are: dtypes, shapes, finite scales, codes in range (io/validate.py).
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

    meta    what it is; ``signed_scale`` and ``perm`` need not be right, they are told from the parts
    stored  every stored tensor that it is made of, side tensors that hold nothing of value included
    parts   plain parts in stored order (the contracted axis last), codes padded to whole blocks; called to read it.
            Raises ValueError where stored numbers mean nothing.
    """

    meta: Meta
    stored: tuple[str, ...]
    parts: Callable[[Get], Parts]


@dataclass(frozen=True)
class Writing:
    """The writing half of a codec.

    refuses  why a tensor cannot be kept exactly, in one sentence; None where it can
    nearest  the spec that a tensor gets which is refused; None: it becomes float
    stored   names, dtypes and shapes that a tensor will store
    pack     the stored tensors of plain parts
    method   ``quantization_config`` of config.json for all quantized tensors; ``plain``: weights of linear layers that
             stay float
    perm     whether channels may lie in another order (``Meta.perm``); where not, such a tensor is quantized anew
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

    name    as ``pennyweight inspect`` and ``convert --to`` call it
    claims  whether a checkpoint is of this format, from ``quantization_config`` of config.json ({} where there is
            none) and the stored tensors
    find    the quantized tensors by parameter name. Raises KeyedError naming the tensor, or ValueError, where names,
            dtypes or shapes do not fit each other or the config; reads only what describes a tensor
    oracle  what the values are compared with in the tests: package and version
    """

    name: str
    claims: Callable[[Mapping[str, Any], Mapping[str, Entry]], bool]
    find: Callable[[Mapping[str, Entry], Mapping[str, Any], Get], dict[str, Found]]
    oracle: str
    writing: Writing | None = None
