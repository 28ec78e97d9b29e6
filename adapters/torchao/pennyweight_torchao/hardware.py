"""Installed versions and capabilities of the machine, under torchao's names."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.repack import prepare

__all__ = [
    "_cpu_is_amx_tile_supported", "_cpu_is_vnni_supported", "_is_device", "_is_fbgemm_genai_gpu_available",
    "_is_float8_type", "_torch_version_at_least", "compare_versions",
    "convert_to_packed_tensor_based_on_current_hardware", "get_available_devices", "get_compute_capability",
    "get_current_accelerator_device", "is_MI300", "is_MI350", "is_ROCM", "is_cuda_version_at_least", "is_device",
    "is_package_at_least", "is_sm_at_least_89", "is_sm_at_least_90", "is_sm_at_least_100", "is_sm_version",
    "parse_version", "should_reduce_range", "torch_version_at_least",
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


def _torch_version_at_least(min_version: str) -> bool:
    """The older name, which also accepts pre-releases such as "2.5.0.dev"."""
    return torch_version_at_least(min_version)


_TORCH_VERSIONS = {
    **{f"TORCH_VERSION_AT_LEAST_2_{n}": torch_version_at_least(f"2.{n}.0") for n in range(2, 9)},
    **{f"TORCH_VERSION_AFTER_2_{n}": torch_version_at_least(f"2.{n}.0.dev") for n in range(2, 6)},
}
globals().update(_TORCH_VERSIONS)
__all__ += list(_TORCH_VERSIONS)


def _installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def is_package_at_least(package_name: str, min_version: str) -> bool:
    """Whether the package is installed, in that version or a newer one, compared as numbers."""
    return _installed(package_name) and _numbers(version(package_name)) >= _numbers(min_version)


def _numbers(text: str) -> list[int]:
    """The leading numbers of a version, without the zeros at their end: "1.10.0rc1" -> [1, 10]."""
    match = re.match(r"\d+(\.\d+)*", text)
    numbers = [int(n) for n in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _is_fbgemm_genai_gpu_available() -> bool:
    return _installed("fbgemm_gpu") and is_package_at_least("fbgemm_gpu", "1.2.0")


# -- devices -----------------------------------------------------------------------------------------------------------


def get_available_devices() -> list[str]:
    """ "cpu" and the available kinds of accelerators."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    elif torch.xpu.is_available():
        devices.append("xpu")
    if torch.mps.is_available():
        devices.append("mps")
    return devices


def get_current_accelerator_device() -> torch.device:
    """Raises RuntimeError if there is no accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        raise RuntimeError("this machine has no accelerator that torch can use; check torch.accelerator.is_available()")
    return device


def is_device(target_device_str: str, device: str | torch.device) -> bool:
    """Whether a device, given as "cuda:0" or as torch's own, is of that kind."""
    return torch.device(device).type == target_device_str


_is_device = is_device


def get_compute_capability() -> float:
    """That of the current CUDA device, 9.0 say; 0.0 without one."""
    if not torch.cuda.is_available():
        return 0.0
    major, minor = torch.cuda.get_device_capability()
    return float(f"{major}.{minor}")


def _capability() -> tuple[int, int]:
    """(0, 0) where there is no NVIDIA GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() and torch.version.cuda else (0, 0)


def is_sm_version(major: int, minor: int) -> bool:
    return _capability() == (major, minor)


def _is_sm_at_least(major: int, minor: int) -> bool:
    return _capability() >= (major, minor)


is_sm_at_least_89 = partial(_is_sm_at_least, 8, 9)
is_sm_at_least_90 = partial(_is_sm_at_least, 9, 0)
is_sm_at_least_100 = partial(_is_sm_at_least, 10, 0)


def is_cuda_version_at_least(major: int, minor: int) -> bool:
    """Of the CUDA that torch was built with; False without a GPU."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return _numbers(torch.version.cuda) >= [n for n in (major, minor) if n]


def is_ROCM() -> bool:
    return torch.cuda.is_available() and torch.version.hip is not None


def _gcn_in(*names: str) -> bool:
    return is_ROCM() and any(name in torch.cuda.get_device_properties(0).gcnArchName for name in names)


is_MI300 = partial(_gcn_in, "gfx940", "gfx941", "gfx942")
is_MI350 = partial(_gcn_in, "gfx950")


def _cpu_has(feature: str) -> bool:
    """What torch's private probe of that name says; False in builds without it."""
    probe: Any = getattr(torch._C._cpu, feature, None) or getattr(torch.cpu, feature, None)
    return probe is not None and bool(probe())


_cpu_is_amx_tile_supported = partial(_cpu_has, "_is_amx_tile_supported")
_cpu_is_vnni_supported = partial(_cpu_has, "_is_vnni_supported")


def should_reduce_range(device: torch.device) -> bool:
    """Whether torch's int8 products can saturate on this device, so that 7-bit codes are needed: CPUs without VNNI."""
    return device.type == "cpu" and not _cpu_is_vnni_supported()


def _is_float8_type(dtype: torch.dtype) -> bool:
    """The four float8 types that a matrix product takes; not e8m0, which holds scales."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
