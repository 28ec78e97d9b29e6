"""Loads the native library and selects its instruction set, once.

It is loaded through ctypes after torch, whose OpenMP runtime it shares. ``PENNYWEIGHT_CPU_ISA`` names the instruction
set to use; default: the best of this machine. With ``PENNYWEIGHT_NATIVE=0`` it is not loaded. Where it is missing,
torch's kernels run instead, and its first use warns. On macOS and Windows it is used after it passed its self-test, or
with ``PENNYWEIGHT_NATIVE=1``; see docs/platforms.md.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import torch  # before the library: it brings the OpenMP runtime

from ...support import environment
from .self_test import verdict

_LOG = logging.getLogger(__name__)
LIBRARY = Path(__file__).with_name("_native.dll" if sys.platform == "win32" else "_native.so")
COMPILER = {"darwin": "Apple's command line tools (xcode-select --install)", "win32": "ziglang (see docs/platforms.md)"}
REMEDY = (
    f"Install {COMPILER.get(sys.platform, 'g++')} and run `pip install --force-reinstall --no-deps .` in a clone of "
    "the repository, or install a wheel"
)
SELF_TESTED = ("darwin", "win32")  # platforms on which the library was built, but not run, before a release
OFF = LIBRARY.with_suffix(".off")  # written by setup.py if PENNYWEIGHT_NATIVE=0 when the package was installed

# Number kinds, as in src/abi.h.
NONE, F32, BF16, F16, E8M0, I8, U8, E4M3 = range(8)
KINDS = {
    None: NONE, torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: I8, torch.uint8: U8,
    torch.float8_e4m3fn: E4M3,
}  # fmt: skip
ABI = 7  # as in src/abi.h
PLAIN, BITS, TILES = range(3)  # storage of codes, as in src/abi.h
INVALID = 2  # status for inconsistent arguments, as in src/abi.h
FLOAT, SYMMETRIC, ASYMMETRIC, STATIC = range(4)  # quantization of the input, as in src/abi.h


class IntLinear(ctypes.Structure):
    """Static properties of a linear layer with integer codes; see src/abi.h."""

    _fields_ = (
        *((name, c_int64) for name in ("n", "k", "kp", "act_group")),
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


class Conv(ctypes.Structure):
    """Static properties of a convolution with integer codes; see src/abi.h."""

    _fields_ = (
        *((name, c_int64) for name in ("o", "c", "kh", "kw", "channels", "kp")),
        *((name, c_int32) for name in ("bits", "center", "scale", "zero_point", "one_scale", "x", "act")),
        *((name, c_int32) for name in ("act_lo", "act_hi", "act_scale")),
        *((name, c_float) for name in ("act_floor", "act_steps")),
    )


class ConvArgs(ctypes.Structure):
    """Arguments of one convolution; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "bias", "codes", "scale", "zero_point", "act_scale")),
        *((name, c_int64) for name in ("n", "h", "w", "oh", "ow", "groups", "stride_h", "stride_w")),
        *((name, c_int64) for name in ("pad_h", "pad_w", "dilation_h", "dilation_w")),
        *((name, c_int32) for name in ("act_zero_point", "bias_kind", "x_last", "y_last", "function", "threads")),
    )


class ChainTensor(ctypes.Structure):
    """A tensor of a chain of convolutions; see src/abi.h."""

    _fields_ = (
        *((name, c_int64) for name in ("channels", "h", "w", "margin_h", "margin_w", "codes", "numbers")),
        ("scale", c_void_p),
        *((name, c_int32) for name in ("zero_point", "lo", "hi", "scale_kind", "output")),
    )


class ChainStep(ctypes.Structure):
    """A step of a chain of convolutions; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("conv", "bias", "codes", "scale", "sums")),
        *((name, c_int64) for name in ("groups", "kh", "kw", "stride_h", "stride_w")),
        *((name, c_int64) for name in ("pad_h", "pad_w", "dilation_h", "dilation_w")),
        *((name, c_int32) for name in ("kind", "x", "y", "residual", "function")),
        *((name, c_float) for name in ("lo", "hi")),
    )


class ChainInput(ctypes.Structure):
    """An input of a chain of convolutions; see src/abi.h."""

    _fields_ = (("data", c_void_p), ("last", c_int64))


class Chain(ctypes.Structure):
    """A call of a chain of convolutions; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("steps", "tensors", "inputs", "outputs")),
        *((name, c_int64) for name in ("n", "scratch")),
        *((name, c_int32) for name in ("step_count", "tensor_count", "input_count", "output_count", "threads")),
    )


CHAIN_INPUT, CHAIN_CONV, CHAIN_MAX, CHAIN_MEAN, CHAIN_ADD = range(5)  # kinds of steps, as in src/abi.h

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
    "pw_block": (_I, (_P,)),
    # weight, x, m, ldx, y, bias, bias kind, codes, scale, outer scale, outer offset, offset, its outer scale, threads
    "pw_float_linear": (_I, (_P, _P, _N, _N, _P, _P, _I, _P, _P, _P, _P, _P, _P, _I)),
    "pw_convolution": (_I, (_P, _P)),  # convolution, arguments
    "pw_conv_chain": (_I, (_P,)),
    "pw_pack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_pack_stream": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    "pw_unpack_codes": (_I, (_P, _N, _N, _N, _I, _I, _P, _I)),
    # matrix; codes, scale, zero point, offset; index or null, rows, out, threads
    "pw_dequantize": (_I, (_P, _P, _P, _P, _P, _P, _N, _P, _I)),
    # rounding, x, ldx; codes, scale, zero point, offset; sums, threads
    "pw_quantize": (_I, (_P, _P, _N, _P, _P, _P, _P, _P, _I)),
    "pw_ranges": (_I, (_P, _P, _N, _P, _I)),
    "pw_finite": (_I, (_P, _I, _N, _I)),
    # type, x, its kind, elements, columns, importance, out, sums, threads
    "pw_gguf_quantize": (_I, (_I, _P, _I, _N, _N, _P, _P, _P, _I)),
    "pw_attention": (_I, (_P, _I)),  # arguments, threads
    "pw_rotary": (_I, (_P, _I)),  # arguments, threads
    "pw_optim_steps": (_I, (_P, _N, _I)),  # jobs, count, threads
    "pw_probe": (c_int64, (_I, _P, _N, _I)),  # what, buffer, bytes or rounds, threads
}


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | str:
    """The library with an instruction set selected, or the reason why it is missing."""
    if off := switched_off():
        return off
    if not LIBRARY.exists():
        return "not built: no C++ compiler when the package was installed"
    if sys.platform in SELF_TESTED and environment.NATIVE.read() != "1" and (failed := verdict(LIBRARY)):
        return f"built, but it fails its self-test: {failed}"
    try:
        if sys.platform == "darwin":  # the OpenMP symbols are looked up in libraries that are loaded globally
            ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libomp.dylib"), mode=ctypes.RTLD_GLOBAL)
        lib = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"built but cannot be loaded: {error}"
    for name, (result, arguments) in _SIGNATURES.items():
        if not hasattr(lib, name):
            return f"built from older sources, without {name}: rebuild it (python setup.py build_ext --inplace)"
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = result, arguments
    if lib.pw_abi() != ABI:
        return "built from other sources: rebuild it (python setup.py build_ext --inplace)"
    wanted = environment.CPU_ISA.read()
    if lib.pw_isa_use(wanted.encode()) < 0:
        names = ", ".join(_isas(lib))
        raise RuntimeError(f"PENNYWEIGHT_CPU_ISA={wanted!r} is not available; this machine has: {names}")
    if not torch.compiler.is_compiling():
        _LOG.info("native CPU kernels: %s, instruction sets %s", LIBRARY, ", ".join(_isas(lib)))
    return lib


def switched_off() -> str | None:
    """Why nobody expects the library here, or None."""
    if environment.NATIVE.read() == "0":
        return "switched off by PENNYWEIGHT_NATIVE=0"
    if OFF.exists():
        return "not built: PENNYWEIGHT_NATIVE=0 when the package was installed"
    return None if sys.platform in ("linux", *SELF_TESTED) else f"not supported on {sys.platform}"


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


def available() -> bool | str:
    """True if the library is available, else the reason why not."""
    lib = load()
    return lib if isinstance(lib, str) else True


def usable() -> bool | str:
    """As :func:`available`, for code that would use the library: warns, once, if it should be there and is not."""
    verdict = available()
    if verdict is not True and not torch.compiler.is_compiling():
        _warn_once(str(verdict))
    return verdict


_warned = False


def _warn_once(reason: str) -> None:
    global _warned  # noqa: PLW0603
    if _warned or switched_off():
        return
    _warned = True  # also if the warning is an error
    warnings.warn(
        f"pennyweight runs without its native CPU kernels ({reason}): torch's kernels run instead, which is slower. "
        f"{REMEDY}. PENNYWEIGHT_NATIVE=0 in the environment silences this.",
        stacklevel=4,
    )
