"""Launches kernels twice with Triton's own driver code over recording_driver.c, and prints JSON: test_launch.py."""

import ctypes
import json
import sys
from typing import Any

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from benchmarks.gpu.aot_compile import FORMATS, NoDevice
from pennyweight.core.formats import E4M3, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.triton import launch, quantize, scaled_mm, tiles, weight_only, workspace

STREAM = 7
POINTERS = {"weight_only": 11, "quantize": 7, "product": 8}  # of each kernel, among its 11 parameters


class Recording(NoDevice):
    """Triton's launcher and utilities, and a device that is not there."""

    def __init__(self) -> None:
        super().__init__("cuda:sm_90")
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher

    def get_current_device(self) -> int:  # type: ignore[override]
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return STREAM


def recorded(library: ctypes.CDLL) -> dict[str, Any]:
    def read(name: str, kind: Any) -> Any:
        found = kind.in_dll(library, name)
        return list(found) if hasattr(found, "__len__") else found.value

    names: dict[str, Any] = {
        "recorded": ctypes.c_ulonglong * 11, "recorded_grid": ctypes.c_uint * 3, "recorded_threads": ctypes.c_uint,
        "recorded_shared": ctypes.c_uint, "recorded_attributes": ctypes.c_uint, "recorded_stream": ctypes.c_ulonglong,
        "launches": ctypes.c_int, "pointers_looked_up": ctypes.c_int,
    }  # fmt: skip
    return {name: read(name, kind) for name, kind in names.items()}


def calls() -> dict[str, Any]:
    """Name -> a function that launches one kernel with the same tensors at each call."""
    found: dict[str, Any] = {}
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    w = AffineQuantizedTensor.from_float(torch.randn(192, 512) * 0.05, FORMATS["uint4 g64 offset"]).to_layout("gpu")
    static = weight_only.static_of(w.spec, (192, 512), torch.bfloat16)
    held, y = weight_only.operand(static, w.spec, w.parts), torch.empty(3, 192, dtype=torch.bfloat16)
    for tile in (tiles.Tile(8, 64, 32, 2, 3), tiles.Tile(8, 64, 32, 4, 3, ahead=True)):
        one = weight_only.Launch(static, 3, tile, 16, False)
        found[f"weight_only {tile}"] = lambda one=one: one(x, held, None, y)
    for f in (INT8, E4M3):
        act = ActivationSpec(QuantSpec(f, (-1,)))
        given = quantize.static_of(act, torch.bfloat16)
        assert isinstance(given, quantize.Static)
        found[f"quantize {f}"] = lambda given=given: quantize.launch(x, given, target="cuda:sm_90")
        codes = AffineQuantizedTensor.from_float(torch.randn(192, 512), QuantSpec(f, (-1,)))
        operand = scaled_mm.operand(codes.spec, (192, 512), codes.parts)
        chosen = scaled_mm.choose(f, "cuda:sm_90", 8, 192, torch.bfloat16, 16)
        assert chosen is not None
        q, scale = torch.zeros(3, 512, dtype=f.code_dtype), torch.ones(3, 1)

        def product(q: Any = q, operand: Any = operand, chosen: Any = chosen, scale: Any = scale) -> torch.Tensor:
            return scaled_mm.launch(q, scale, operand, None, torch.bfloat16, chosen, 16)

        found[f"product {f}"] = product
    return found


def main() -> None:
    library = ctypes.CDLL("libcuda.so.1")
    driver.set_active(Recording())
    launch._stream_of = lambda index: STREAM
    sums, locks = torch.empty(1 << 20), torch.zeros(1 << 12, dtype=torch.int32)
    workspace.parts = lambda count, device: sums[:count]
    workspace.locks = lambda count, device: locks
    found = {}
    for name, call in calls().items():
        ctypes.c_int.in_dll(library, "pointers").value = POINTERS[name.split()[0]]
        kept = []  # results: the allocator must not hand out their addresses again, or both calls would have them
        states = []
        for _ in range(2):
            kept.append(call())
            states.append(recorded(library))
        found[name] = states
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
