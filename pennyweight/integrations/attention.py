"""Attention of transformers models on a CPU, for inference.

With small quantized weights, attention takes a third of the time of a token. The native kernel (native/attention.py)
reads keys and values once for all query heads that share them, and computes in float32. Where it is missing or cannot
be used, query heads that share their keys are the rows of one torch call: torch multiplies one row in bfloat16 eight
times slower than four rows, and [B, H, 1, D] and [B, H / G, G, D] are the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.cpu import library
from ..kernels.native import attention as native_attention

NAME = "pennyweight"


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """softmax(query @ key.T * scaling + mask) @ value, as transformers' "sdpa" computes it.

    query: [B, H, S, D]; key, value: [B, H / G, L, D]; attention_mask: bool or float [B, 1 or H, S, L] or None.
    Returns [B, S, H, D]. Native where no gradient is needed, see :func:`_native`; all other cases but one token of
    grouped heads are passed on to "sdpa".
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    (b, h, s, d), shared = query.shape, key.shape[1]
    special = [kwargs.get(name) for name in ("position_bias", "cache", "softcap", "output_attentions", "dropout")]
    if query.device.type != "cpu" or any(v is not None and v is not False and v != 0 for v in special):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    y = _native(module, query, key, value, attention_mask, kwargs.get("scaling"), kwargs.get("is_causal"))
    if y is not None:
        return y.transpose(1, 2), None
    if s != 1 or h == shared:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    mask = attention_mask
    if mask is not None and mask.shape[1] == h:
        mask = mask.reshape(b, shared, h // shared, -1)
    rows = query.reshape(b, shared, h // shared, d)
    y = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return y.reshape(b, 1, h, d), None


def _native(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: Any
) -> Tensor | None:
    """[B, H, S, D] by the native kernel; None where it is missing, under torch.compile or another tracer, where a
    gradient is needed, and for tensors that it does not read."""
    if torch.compiler.is_compiling() or library.usable() is not True:
        return None
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    s, length = query.shape[2], key.shape[2]
    # As "sdpa": causal only without a mask, and then a static cache has no tokens before the prompt.
    causal = s > 1 and mask is None and (getattr(module, "is_causal", True) if causal is None else causal)
    if causal and length > s:
        key, value = key[:, :, :s], value[:, :, :s]
    if (causal and length < s) or native_attention.reason(query, key, value, mask) is not True:
        return None
    return native_attention.attention(query, key, value, mask, causal=bool(causal), scale=scale)


def use_grouped_attention(model: Any) -> None:
    """Make a transformers model use :func:`grouped_attention`. ``model.set_attn_implementation("sdpa")`` undoes it.

    Raises ValueError if the model does not use "sdpa", whose results this reproduces.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    now = model.config._attn_implementation
    if now not in ("sdpa", NAME):
        raise ValueError(
            f'grouped attention replaces only "sdpa", but {type(model).__name__} uses {now!r}; '
            'model.set_attn_implementation("sdpa") first, if the model supports it'
        )
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
