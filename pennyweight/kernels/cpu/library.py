"""Loads the native library and selects its instruction set, once.

It is loaded through ctypes after torch, whose OpenMP runtime it shares. ``PENNYWEIGHT_CPU_ISA`` names the instruction
set to use; default: the best of this machine.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch  # before the library: it brings the OpenMP runtime

# Number kinds, as in src/abi.h.
NONE, F32, BF16, F16, E8M0, I8, U8, E4M3 = range(8)
KINDS = {
    None: NONE, torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: I8, torch.uint8: U8,
    torch.float8_e4m3fn: E4M3,
}  # fmt: skip
ABI = 4  # as in src/abi.h
PLAIN, BITS, TILES = range(3)  # storage of codes, as in src/abi.h
INVALID = 2  # status for inconsistent arguments, as in src/abi.h
FLOAT, SYMMETRIC, ASYMMETRIC, STATIC = range(4)  # quantization of the input, as in src/abi.h


class IntLinear(ctypes.Structure):
    """Static properties of a linear layer with integer codes; see src/abi.h."""

    _fields_ = (
        *((name, c_int64) for name in ("n", "k", "kp")),
        *((name, c_int32) for name in ("bits", "center", "group", "block", "scale", "zero_point", "offset")),
        *((name, c_int32) for name in ("outer", "outer_kind", "x", "act")),
        *((name, c_int32) for name in ("act_lo", "act_hi", "act_scale")),
        *((name, c_float) for name in ("act_floor", "act_steps")),
    )


class LinearArgs(ctypes.Structure):
    """Arguments of one call; see src/abi.h."""

    _fields_ = (
        ("x", c_void_p), ("m", c_int64), ("ldx", c_int64),
        *((name, c_void_p) for name in ("y", "bias", "codes", "scale", "zero_point", "offset")),
        *((name, c_void_p) for name in ("outer_scale", "outer_offset", "act_scale")),
        *((name, c_int32) for name in ("act_zero_point", "bias_kind", "threads")),
    )  # fmt: skip


class FloatLinear(ctypes.Structure):
    """Static properties of a linear layer with float or table codes; see src/abi.h."""

    _fields_ = (
        *((name, c_int64) for name in ("n", "k", "kp", "scale_groups", "outer_groups")),
        *((name, c_void_p) for name in ("values", "low", "high")),
        *((name, c_int32) for name in ("bits", "decode", "exponent", "mantissa", "group", "block", "row_block")),
        *((name, c_int32) for name in ("scale", "offset", "outer", "outer_kind", "x")),
        ("limit", c_float),
    )


_P, _N, _I = c_void_p, c_int64, c_int
_SIGNATURES = {
    "pw_abi": (_I, ()),
    "pw_isa_count": (_I, ()),
    "pw_isa_name": (c_char_p, (_I,)),
    "pw_isa_here": (_I, (_I,)),
    "pw_isa_use": (_I, (c_char_p,)),
    # weight, x, m, ldx, y, bias, bias kind, codes, scale, zero point, offset, outer scale, outer offset, act scale,
    # act zero point, threads
    "pw_int_linear": (_I, (_P, _P, _N, _N, _P, _P, _I, _P, _P, _P, _P, _P, _P, _P, _N, _I)),
    "pw_int_linears": (_I, (_P, _P, _I)),  # weights, arguments, count
    # weight, x, m, ldx, y, bias, bias kind, codes, scale, outer scale, outer offset, offset, its outer scale, threads
    "pw_float_linear": (_I, (_P, _P, _N, _N, _P, _P, _I, _P, _P, _P, _P, _P, _P, _I)),
    "pw_pack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_unpack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    # matrix; codes, scale, zero point, offset; index or null, rows, out, threads
    "pw_dequantize": (_I, (_P, _P, _P, _P, _P, _P, _N, _P, _I)),
    # rounding, x, ldx; codes, scale, zero point, offset; sums, threads
    "pw_quantize": (_I, (_P, _P, _N, _P, _P, _P, _P, _P, _I)),
    "pw_ranges": (_I, (_P, _P, _N, _P, _I)),
    "pw_finite": (_I, (_P, _I, _N, _I)),
    "pw_optim_steps": (_I, (_P, _N, _I)),  # jobs, count, threads
    "pw_probe": (c_int64, (_I, _P, _N, _I)),  # what, buffer, bytes or rounds, threads
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library with an instruction set selected, or the reason why it is missing."""
    found = sorted(Path(__file__).parent.glob("_native.so"))
    if not found:
        return "not built: no C++ compiler when the package was installed (reinstall with g++, PENNYWEIGHT_NATIVE=1)"
    try:
        lib = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return f"built but cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        if not hasattr(lib, name):
            return f"built from older sources, without {name}: rebuild it (python setup.py build_ext --inplace)"
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = result, arguments
    if lib.pw_abi() != ABI:
        return "built from other sources: rebuild it (python setup.py build_ext --inplace)"
    wanted = os.environ.get("PENNYWEIGHT_CPU_ISA", "")
    if lib.pw_isa_use(wanted.encode()) < 0:
        names = ", ".join(_isas(lib))
        raise RuntimeError(f"PENNYWEIGHT_CPU_ISA={wanted!r} is not available; this machine has: {names}")
    return lib


def native() -> ctypes.CDLL:
    """The library. Raises RuntimeError if it is missing."""
    lib = load()
    if isinstance(lib, str):
        raise RuntimeError(f"native CPU kernels: {lib}")
    return lib


def _isas(lib: ctypes.CDLL) -> list[str]:
    return [lib.pw_isa_name(i).decode() for i in range(lib.pw_isa_count()) if lib.pw_isa_here(i)]


def isas() -> list[str]:
    """Instruction sets that were built and that this machine supports, best last; empty without the library."""
    lib = load()
    return [] if isinstance(lib, str) else _isas(lib)


def use_isa(name: str) -> None:
    """Switch to another instruction set ("": the best). Raises ValueError if it is not available."""
    if native().pw_isa_use(name.encode()) < 0:
        raise ValueError(f"instruction set {name!r} is not available; this machine has: {', '.join(isas())}")


def missing() -> bool | str:
    """True if the library is available, else the reason why not."""
    lib = load()
    return lib if isinstance(lib, str) else True
