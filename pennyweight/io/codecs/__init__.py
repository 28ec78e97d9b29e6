"""File formats of other libraries that live in safetensors: one file each, listed in ``CODECS``."""

from __future__ import annotations

from .base import Codec, Found, Writing
from .gptq import GPTQ, GPTQ_V2

# In the order in which they are asked; the first that claims a checkpoint reads it.
CODECS: tuple[Codec, ...] = (GPTQ, GPTQ_V2)

__all__ = ["CODECS", "Codec", "Found", "Writing"]
