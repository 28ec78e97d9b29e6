"""Whether a family of Triton kernels may be used on a device: it proves itself there before its first use.

The cases are in :mod:`.self_test`, and registered here: kernels ask this file, and the cases run the kernels. The
verdict is kept for this card, driver, torch, triton and kernel sources, one for each family: a family that fails is
refused alone. ``PENNYWEIGHT_GPU=0`` switches the kernels off, ``1`` trusts them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from ...core.tracing import plain_tensors
from ...support import environment
from ...support.environment import cache_folder
from ...support.errors import ArgumentError
from ...support.extras import install
from ..target import device_type, target_of

# Family -> (name of its kernel in the table, what runs instead)
FAMILIES = {
    "weight_only": (
        "triton_weight_only",
        "quantized layers with float inputs run on kernels of torch, or are dequantized at each call",
    ),
    "quantize_int": ("quantize_rows", "int8 inputs are quantized by torch's operators, several times as slowly"),
    "quantize_float": ("quantize_rows", "float8 inputs are quantized by torch's operators, several times as slowly"),
    "float8": ("triton_float8", "products of float8 inputs run on torch._scaled_mm"),
    "int8": ("triton_int8", "products of int8 inputs run on the weight-only kernel, or on torch._int_mm"),
}
Prover = Callable[[torch.device, str], dict[str, str | None]]
_PROVERS: list[Prover] = []  # one, set in __init__.py


def register(prover: Prover) -> Prover:
    """Set what runs the cases: (device, family) -> the result of each case, None or what failed."""
    _PROVERS[:] = [prover]
    return prover


def refusal(target: str, family: str) -> str | None:
    """Why kernels of a family must not be used for a target; None: they may, or this machine has no such device."""
    setting = environment.GPU.read()
    if setting == "0":
        return f"Triton kernels are switched off: {environment.GPU.name}=0"
    if not torch.cuda.is_available() or device_type(target) != "cuda":
        return None  # answers for a device that is not here, or fake tensors: as if it were there and proven
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if target_of(device) == target:
            if importlib.util.find_spec("triton") is None:
                return f"needs triton: {install('gpu')}"
            return None if setting == "1" else verdict(device, family)
    return None


# torch.compiler.assume_constant_result, which would import torch._dynamo: kernels are selected while a graph is traced
refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def verdict(device: torch.device, family: str) -> str | None:
    """None if the family's kernels are right on this device, else which case failed; warns when it is found out."""
    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "the Triton kernels prove themselves at their first use on a device, which cannot be while a CUDA graph is "
            "captured; run the model once before the capture, or run `pennyweight doctor --device cuda` once"
        )
    kept = cache_folder() / f"gpu-{_digest(device)}.json"
    found = _read(kept)
    if family in found:
        return found[family]
    with plain_tensors():  # not those of a mode or a trace that is active at the first use
        results = _PROVERS[0](device, family)
    failed = next((f"{name}: {why}" for name, why in results.items() if why is not None), None)
    if failed is not None:
        kernel, instead = FAMILIES[family]
        failed = f"it failed its self-test on this device ({failed})"
        warnings.warn(
            f"pennyweight does not use its kernel {kernel} on {torch.cuda.get_device_name(device)}: {failed}; "
            f"{instead}. `pennyweight doctor --device cuda` shows all cases; please report them",
            UserWarning,
            stacklevel=2,
        )
    with suppress(OSError):  # nowhere to keep it: the next process proves again
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**_read(kept), family: failed}), "utf-8")
        fresh.replace(kept)
    return failed


def _read(kept: Path) -> dict[str, str | None]:
    """Family -> verdict; empty if none was kept."""
    try:
        found = json.loads(kept.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    known = found if isinstance(found, dict) else {}
    return {name: why for name, why in known.items() if why is None or isinstance(why, str)}


def _digest(device: torch.device) -> str:
    """Of all that a verdict depends on: card, driver, torch, triton, and the sources and tiles of the kernels."""
    import triton

    digest = hashlib.sha256()
    properties = torch.cuda.get_device_properties(device)
    driver = torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else ""
    digest.update(f"{properties.name} {target_of(device)} {driver} {torch.__version__} {triton.__version__}".encode())
    folder = Path(__file__).parent
    for source in (*sorted(folder.glob("*.py")), folder / "tiles.json"):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]
