"""The structures of attention and rotary embeddings for the native library; see src/abi.h."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

ROTATIONS = {None: 0, "half": 1, "interleaved": 2}  # Rotation in src/abi.h
NORMS = {None: 0, "layer": 1, "rms": 2}  # NormKind in src/abi.h
_STRIDES2, _STRIDES3, _STRIDES4 = c_int64 * 2, c_int64 * 3, c_int64 * 4


class RowNorm(ctypes.Structure):
    """Normalization of rows; see src/abi.h."""

    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p),
        *((name, c_int32) for name in ("kind", "weight_kind", "bias_kind")), ("eps", c_float), ("offset", c_float),
    )  # fmt: skip


class RotaryArgs(ctypes.Structure):
    """Normalization and rotation of q and k, and the new tokens of a cache; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("keys", c_void_p), ("values", c_void_p), ("key_strides", _STRIDES3), ("value_strides", _STRIDES3),
        ("cos", c_void_p), ("sin", c_void_p), ("cos_strides", _STRIDES2), ("sin_strides", _STRIDES2),
        ("q_norm", RowNorm), ("k_norm", RowNorm),
        *((name, c_int64) for name in ("batch", "tokens", "past")),
        *((name, c_int32) for name in ("heads", "shared", "size", "rotation", "rotated")),
        *((name, c_int32) for name in ("cache_kind", "angle_kind")),
    )  # fmt: skip


class CacheCodes(ctypes.Structure):
    """Keys or values as codes; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scale", "offset")),
        *((name, _STRIDES3) for name in ("code_strides", "scale_strides", "offset_strides")),
        ("row", c_int64),
        *((name, c_int32) for name in ("bits", "kind", "tokens", "channels")),
    )


class AttentionArgs(ctypes.Structure):
    """One call of attention; see src/abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "out", "keys", "values", "mask")),
        *((name, _STRIDES3) for name in ("q_strides", "out_strides", "key_strides", "value_strides")),
        ("mask_strides", _STRIDES4),
        *((name, c_int64) for name in ("batch", "tokens", "length", "window")),
        *((name, c_int32) for name in ("heads", "shared", "size", "q_kind", "out_kind", "kind", "mask_kind", "causal")),
        ("scale", c_float), ("softcap", c_float),
        ("past", c_int64), ("past_keys", c_void_p), ("past_values", c_void_p),
    )  # fmt: skip
