"""Exports a state dict in another library's format, every quantized tensor exactly; otherwise raises an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.spec import QuantSpec
from .codecs import CODECS, Codec
from .errors import CheckpointError
from .manifest import Meta
from .meta_model import looks_linear
from .safetensors_file import Entry
from .state_dict import Item, items

# Formats that transformers can read without this package, and save_pretrained can write
FORMATS = ("compressed-tensors",)


def convert_exactly(
    state_dict: Mapping[str, Any], format: str, linear: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Stored tensors and "quantization_config" of config.json, readable without this package.

    format  one of FORMATS
    linear  names of nn.Linear weights; the reader does not recognize other weights

    Raises CheckpointError for a tensor that the format, or its reader in transformers, cannot represent exactly. The
    minimum scale of dynamic activations (``ActivationSpec.eps``) is not kept: the reader has its own.
    """
    codec = next(c for c in CODECS if c.name == format)
    assert codec.writing is not None
    some = items(state_dict)
    tensors: dict[str, Tensor] = {}
    metas: dict[str, Meta] = {}
    plain: list[str] = []
    for item in some:
        value = state_dict[item.name]
        if item.meta is None:
            # tied tensors are stored under each name; the caller decides which to omit
            tensors |= dict.fromkeys((item.name, *item.aliases), value)
            if looks_linear(item.name, Entry(value.dtype, tuple(value.shape))):
                plain.append(item.name)
            continue
        why = _refused(codec, item, linear)
        if why is not None:
            raise CheckpointError(
                None, item.name, f"cannot be saved as {format}: {why}; save this model in Pennyweight's own format"
            )
        metas[item.name] = item.meta
        tensors |= codec.writing.pack(item.name, value.plain_parts(), item.meta)
    method = codec.writing.method(metas, tuple(plain))
    _check_read_back(codec, tensors, metas, method)
    return tensors, method


def _refused(codec: Codec, item: Item, linear: Collection[str]) -> str | None:
    meta = item.meta
    assert meta is not None
    assert codec.writing is not None
    if item.name not in linear or item.aliases:
        return "its reader supports only quantized weights of linear layers that are not tied"
    why = codec.writing.refuses(item.name, meta)
    if why is not None:
        return why
    if meta.perm:
        return "its channels are permuted"
    if meta.spec.zero_point:
        return "its reader in transformers does not support zero points (compressed-tensors 0.20)"
    if isinstance(meta.spec.scale, QuantSpec) and meta.dtype is not torch.bfloat16:
        return f"its reader dequantizes MX formats to bfloat16, but the model is {meta.dtype}"
    return None


def _check_read_back(
    codec: Codec, tensors: Mapping[str, Tensor], metas: Mapping[str, Meta], method: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless the codec reads the stored tensors back unchanged."""
    entries = {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    found = codec.find(entries, method, tensors.__getitem__)
    for name, meta in metas.items():
        back = found[name].meta
        if back.spec != meta.spec or _without_eps(back) != _without_eps(meta):
            raise CheckpointError(
                None, name, f"cannot be saved as {codec.name}: {meta.spec} would be read back as {back.spec}; save "
                "this model in Pennyweight's own format"
            )  # fmt: skip


def _without_eps(meta: Meta) -> Any:
    return None if meta.act is None else replace(meta.act, eps=None)
