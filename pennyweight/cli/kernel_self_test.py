"""Runs each kernel of the table once on a small weight and compares it with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..algorithms.solvers.rtn import quantize_weight
from ..core.tensor import AffineQuantizedTensor
from ..kernels import Kernel, get_kernel, kernels
from ..kernels.table import case_of
from ..planning.parameters import Site
from .aliases import CONFIGS, build

# Maximum distance of a kernel from the reference, as a ratio of norms: the error of its declared arithmetic with a
# margin for its sums, and for outputs rounded to bfloat16 (2**-9 per element).
_LIMITS = {"exact": 1e-6, "float32": 1e-4, "fixed22": 1e-4, "bfloat16": 2e-2}
_SHAPES = {"linear": (1024, 1024), "embedding": (64, 128), "bmm": (2, 64, 128), "convolution": (16, 8, 3, 3)}


@dataclass(frozen=True)
class CheckedKernel:
    """One row of the kernel table on this machine."""

    op: str
    name: str
    usable: bool
    note: str
    broken: bool = False  # it accepts a case and then fails or returns wrong values


def check_kernels(devices: set[str]) -> list[CheckedKernel]:
    """Run every kernel with the first config that it accepts, on one of the devices."""
    return [CheckedKernel(kernel.op, kernel.name, *_check(kernel, devices)) for kernel in kernels()]


def _check(kernel: Kernel, devices: set[str]) -> tuple[bool, str, bool]:
    """(usable, note, broken)."""
    here = [d for d in kernel.devices or ("cpu",) if d in devices]
    if not here:
        return False, f"runs on {', '.join(kernel.devices or ())} only", False
    if kernel.op not in _SHAPES:
        return True, "not tested: doctor has no inputs for this op", False
    reasons: list[str] = []
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            try:
                weight = _weight(name, kernel.op, dtype, here[0])
                refused = kernel.refuses(case_of(weight, dtype), any_layout=True)
            except ValueError as error:  # a config may not fit an op at all
                refused = str(error)
            if refused is None:
                return _try(kernel, weight, f"with {name} weights and {str(dtype).removeprefix('torch.')} inputs")
            reasons.append(refused)
    return False, f"no config uses it: {'; '.join(dict.fromkeys(reasons))}", False


def _try(kernel: Kernel, weight: AffineQuantizedTensor, how: str) -> tuple[bool, str, bool]:
    if kernel.rank < 0:
        return True, "the reference: dequantizes any weight at each call", False
    try:
        far = _distance(kernel, get_kernel(kernel.op, "dequantize"), weight)
    except Exception as error:  # a broken build may raise anything; doctor must report it
        return False, f"{type(error).__name__}: {error}", True
    limit = max(_LIMITS[kernel.tolerance], _LIMITS["bfloat16"] if weight.dtype is torch.bfloat16 else 0.0)
    if not far <= limit:  # also true for NaN
        return False, f"differs by {far:.1e} from the reference {how}; the limit is {limit:.0e}", True
    return True, f"{f'within {far:.0e} of' if far else 'equal to'} the reference {how}", False


def _weight(name: str, op: str, dtype: torch.dtype, device: str) -> AffineQuantizedTensor:
    shape = _SHAPES[op]
    site = Site("weight", "", "weight", op, shape, dtype, device, "Linear")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return quantize_weight(values, build(name).scheme(site))[0]


def _distance(kernel: Kernel, reference: Kernel, weight: AffineQuantizedTensor) -> float:
    """|y - y_reference| / |y_reference|."""
    random = torch.Generator().manual_seed(1)
    packed = weight if kernel.layout is None else weight.to_layout(kernel.layout)
    rest: tuple[Any, ...] = (None,)
    if kernel.op == "embedding":
        x = torch.arange(0, 64, 7, device=weight.device)
    elif kernel.op == "convolution":
        x = torch.randn(2, 8, 9, 9, generator=random).to(weight.device, weight.dtype)
        rest = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    else:
        x = torch.randn(*weight.shape[:-2], 5, weight.shape[-1], generator=random).to(weight.device, weight.dtype)
    with torch.no_grad():
        y, expected = kernel.run(x, packed, *rest).double(), reference.run(x, weight, *rest).double()
    return float((y - expected).norm() / expected.norm())
