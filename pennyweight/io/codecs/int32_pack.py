"""Codes packed into 32-bit words, least significant bits first, in two layouts.

dense     a row is one bit stream: code i has bits [i*b, (i+1)*b), across words. compressed-tensors 0.20, GPTQ.
by word   a word has 32 // b whole codes; with 3, 5, 6 or 7 bits its highest bits are unused. Older releases.

With 1, 2, 4 and 8 bits the two layouts are identical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.packing import pack_bits, unpack_bits


def dense_words(n: int, bits: int) -> int:
    return -(-n * bits // 32)


def whole_words(n: int, bits: int) -> int:
    return -(-n // (32 // bits))


def is_dense(words: int, n: int, bits: int) -> bool | None:
    """Layout of n codes of a row in that many words; dense if both are possible; None if neither is."""
    return True if words == dense_words(n, bits) else False if words == whole_words(n, bits) else None


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [.., n] -> int32 words [.., ceil(n * bits / 32)], dense; unused bits are zero."""
    n = codes.shape[-1]
    stream = pack_bits(codes, bits)
    missing = 4 * dense_words(n, bits) - stream.shape[-1]
    padded = torch.nn.functional.pad(stream, (0, missing))
    return (
        padded.reshape(-1).view(torch.int32).reshape(*codes.shape[:-1], -1)
    )  # view() checks strides of single rows too


def unpack(words: Tensor, bits: int, n: int, dense: bool) -> Tensor:
    """int32 words -> uint8 codes [.., n]."""
    if dense or 32 % bits == 0:
        if words.stride(-1) != 1:  # view() checks the stride of a single column, which contiguous() ignores
            words = words.clone(memory_format=torch.contiguous_format)
        return unpack_bits(words.contiguous().view(torch.uint8), bits, n)[..., :n].contiguous()
    mask = (1 << bits) - 1
    codes = torch.stack([(words >> (bits * j) & mask).to(torch.uint8) for j in range(32 // bits)], -1)
    return codes.flatten(-2)[..., :n].contiguous()
