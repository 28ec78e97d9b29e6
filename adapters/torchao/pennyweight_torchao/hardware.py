"""Versions of torch, and packing for this machine, under torchao's names."""

from __future__ import annotations

import re
from typing import Any

import torch

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.repack import prepare

__all__ = [
    "compare_versions", "convert_to_packed_tensor_based_on_current_hardware", "parse_version",
    "torch_version_at_least",
]  # fmt: skip

# -- packing -----------------------------------------------------------------------------------------------------------


def convert_to_packed_tensor_based_on_current_hardware(tensor: Any) -> Any:
    """The weight of a linear layer, packed for the kernel that runs here; any other tensor unchanged. vLLM calls it for
    each weight after loading."""
    return prepare(tensor) if isinstance(tensor, AffineQuantizedTensor) and tensor.ndim == 2 else tensor


# -- versions ----------------------------------------------------------------------------------------------------------


def parse_version(version_string: str) -> list[int]:
    """[major, minor, patch] of "2.5.1+cpu". The patch of a pre-release ("2.5.0a0", "2.5.0.dev2024") is -1, so that it
    sorts before its release. Raises ValueError for anything else."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(.*)", version_string)
    if match is None:
        raise ValueError(f"expected a version such as 2.5.1, got {version_string!r}")
    major, minor, patch = map(int, match.groups()[:3])
    before = re.match(r"(a|b|rc)\d|.*(git|dev)", match[4]) is not None
    return [major, minor, -1 if before else patch]


def compare_versions(v1: str, v2: str) -> int:
    """-1, 0 or 1 if v1 is older than, equal to, or newer than v2."""
    a, b = parse_version(v1), parse_version(v2)
    return (a > b) - (a < b)


def torch_version_at_least(min_version: str) -> bool:
    return compare_versions(torch.__version__, min_version) >= 0


_TORCH_VERSIONS = {
    **{f"TORCH_VERSION_AT_LEAST_2_{n}": torch_version_at_least(f"2.{n}.0") for n in range(2, 9)},
    **{f"TORCH_VERSION_AFTER_2_{n}": torch_version_at_least(f"2.{n}.0.dev") for n in range(2, 6)},
}
globals().update(_TORCH_VERSIONS)
__all__ += list(_TORCH_VERSIONS)
