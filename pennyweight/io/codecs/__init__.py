"""File formats of other libraries that live in safetensors: one file each, listed in ``CODECS``."""

from __future__ import annotations

from . import compressed_tensors, fp8_block, mxfp4
from .awq import AWQ
from .base import Codec, Found, Writing
from .bitsandbytes import BITSANDBYTES
from .hqq import HQQ

# In the order in which they are asked; the first that claims a checkpoint reads it.
CODECS: tuple[Codec, ...] = (compressed_tensors.CODEC, fp8_block.CODEC, mxfp4.CODEC, BITSANDBYTES, HQQ, AWQ)

__all__ = ["CODECS", "Codec", "Found", "Writing"]
