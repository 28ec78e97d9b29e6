"""Targets: what a kernel runs on, as text. The only file that asks torch for the capability of a device.

    "cpu"  "cuda:sm_90"  "hip:gfx942"  "xpu"  "mps"  ..      type of the device, and its architecture where that decides
    "cuda"                                                  NVIDIA, of unknown capability: fake tensors without a driver

A target is no device: every GPU of one kind has the same, and :func:`read_target` takes one that this machine lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch

from ..core.model_arguments import check_device
from ..support.arguments import did_you_mean, hint, show
from ..support.errors import ArgumentError, ArgumentTypeError

# What messages suggest, and what the tests of the table ask for: one per generation with other kernels
KNOWN = (
    "cpu", "cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120", "hip:gfx90a",
    "hip:gfx942", "hip:gfx950", "mps", "xpu",
)  # fmt: skip
_WRITTEN = r"cpu|mps|xpu|cuda:sm_(?:[5-9]\d|1\d\d)|hip:gfx[0-9a-f]{3,4}"  # compiled at its first use, not by an import
_ASSUMED: dict[str, str] = {}  # device type -> target, under :func:`assume_target`


def target_of(device: torch.device | str) -> str:
    """The target of a device. Of a CUDA device that this build or machine of torch lacks (a fake tensor): "cuda"."""
    device = torch.device(device)
    if _ASSUMED:
        return _ASSUMED.get(device.type) or _target(device.type, device.index)
    return _target(device.type, device.index)


@lru_cache(maxsize=256)
def _target(kind: str, index: int | None) -> str:
    if kind != "cuda":
        return kind
    if not torch.cuda.is_available() or (index or 0) >= torch.cuda.device_count():
        return "cuda"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip is not None:
        return f"hip:{properties.gcnArchName.partition(':')[0]}"
    return f"cuda:sm_{properties.major}{properties.minor}"


# torch.compiler.assume_constant_result, which would import torch._dynamo: kernels are selected while a graph is traced
target_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forget_targets() -> None:
    """Ask torch again at the next call; for tests that change what torch answers."""
    _target.cache_clear()


@contextmanager
def assume_target(target: str) -> Iterator[None]:
    """Within this context, devices of that type have this target: what fake CUDA tensors are packed for. Not for
    threads that run kernels."""
    kind = device_type(target if target in ("cuda", "hip") else read_target(target))
    before = _ASSUMED.get(kind)
    _ASSUMED[kind] = target
    try:
        yield
    finally:
        del _ASSUMED[kind]
        if before is not None:
            _ASSUMED[kind] = before


def device_type(target: str) -> str:
    """The type of torch's device: "cuda" for "cuda:sm_90" and "hip:gfx942"."""
    kind = target.partition(":")[0]
    return "cuda" if kind == "hip" else kind


def fits(devices: Sequence[str] | None, target: str) -> bool:
    """Whether a target is one of ``devices``. None: all.

    "cuda"  any NVIDIA device;  "cuda:sm_90"  this one;  "cuda:sm_89+"  this compute capability or higher
    """
    return devices is None or any(_is(entry, target) for entry in devices)


def _is(entry: str, target: str) -> bool:
    if entry == target or target.startswith(f"{entry}:"):
        return True
    return entry.endswith("+") and capability(target) >= capability(entry.removesuffix("+"))


def capability(target: str) -> int:
    """90 of "cuda:sm_90"; 0 of targets without compute capability, or of unknown one."""
    kind, _, arch = target.partition(":sm_")
    return int(arch) if kind == "cuda" and arch.isdigit() else 0


def read_target(device: torch.device | str, name: str = "device") -> str:
    """The target that a user names: a target, which this machine may lack, or a device of this machine.

    Raises ArgumentError for other texts, with the nearest target.
    """
    if not isinstance(device, (str, torch.device)):
        raise ArgumentTypeError(f"{name} must be a device or a target such as 'cuda:sm_90', got {show(device)}")
    text = str(device)
    if re.fullmatch(_WRITTEN, text):
        return text
    if text in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ArgumentError(
            f"{name}={text!r}: this machine or this build of torch has no CUDA device, so its compute capability is "
            f"not known; name it: {', '.join(map(repr, (t for t in KNOWN if t.startswith('cuda'))))}"
        )
    if re.fullmatch(r"\w+(:\d+)?", text):
        try:
            check_device(name, text)
            return target_of(text)
        except (ValueError, RuntimeError):
            pass  # no device: what it may have meant is said below
    near = [t for t in KNOWN if t.endswith(text)]
    guess = hint(near[:1]) if text and near else did_you_mean(text, KNOWN, 2)
    raise ArgumentError(
        f"{name}={text!r} is neither a target{guess} nor a device of this machine; targets are {', '.join(KNOWN)} and "
        "others of these forms"
    )


def check_target(name: str, value: object) -> None:
    """Raise ArgumentError unless the value is None, a device of this machine, or a target."""
    if value is not None:
        read_target(value, name)  # type: ignore[arg-type]
