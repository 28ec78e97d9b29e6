"""Sizes as people type them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse(text: str) -> int:
    """Bytes of "4GB", "1.5 GiB", "500_000". Raises ValueError."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?) *([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write 4GB, 500MB or 2GiB")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ValueError(f"a size must be at least one byte, got {text!r}")
    return size
