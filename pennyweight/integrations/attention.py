"""Grouped-query attention of one new token over a KV cache, for transformers models on a CPU.

With small quantized weights, attention takes a third of the time of a token: torch multiplies one row in bfloat16
eight times slower than four rows. Query heads that share their keys (grouped-query attention) can form these rows:
[B, H, 1, D] and [B, H / G, G, D] are the same memory, and the attention of each row is unchanged.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

NAME = "pennyweight"


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """softmax(query @ key.T * scaling + mask) @ value, as transformers' "sdpa" computes it.

    query: [B, H, S, D]; key, value: [B, H / G, L, D]; attention_mask: bool or float [B, 1 or H, S, L] or None.
    Returns [B, S, H, D]. All other cases are passed on to "sdpa".
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    (b, h, s, d), shared = query.shape, key.shape[1]
    special = [kwargs.get(name) for name in ("position_bias", "cache", "softcap", "output_attentions", "dropout")]
    if (
        s != 1
        or h == shared
        or query.device.type != "cpu"
        or any(v is not None and v is not False and v != 0 for v in special)
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    mask = attention_mask
    if mask is not None and mask.shape[1] == h:
        mask = mask.reshape(b, shared, h // shared, -1)
    rows = query.reshape(b, shared, h // shared, d)
    y = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return y.reshape(b, 1, h, d), None


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
