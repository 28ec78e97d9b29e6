"""File formats of other libraries that live in safetensors: one file each, listed in ``CODECS``."""

from __future__ import annotations

from .awq import AWQ
from .base import Codec, Found, Writing
from .bitsandbytes import BITSANDBYTES
from .hqq import HQQ

# In the order in which they are asked; the first that claims a checkpoint reads it.
CODECS: tuple[Codec, ...] = (BITSANDBYTES, HQQ, AWQ)

__all__ = ["CODECS", "Codec", "Found", "Writing"]
