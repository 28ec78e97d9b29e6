"""Codecs for other libraries' formats stored in safetensors: one module each, listed in ``CODECS``."""

from __future__ import annotations

from .awq import AWQ
from .base import Codec, Found, Writing
from .bitsandbytes import BITSANDBYTES
from .compressed_tensors import COMPRESSED_TENSORS
from .fp8_block import FP8
from .gptq import GPTQ, GPTQ_V2
from .hqq import HQQ
from .mxfp4 import EXPERTS_MXFP4

# In order of detection; the first that claims a checkpoint reads it.
CODECS: tuple[Codec, ...] = (COMPRESSED_TENSORS, GPTQ, GPTQ_V2, AWQ, BITSANDBYTES, FP8, EXPERTS_MXFP4, HQQ)

__all__ = ["CODECS", "Codec", "Found", "Writing"]
