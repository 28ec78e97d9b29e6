"""What can be wrong with one stored tensor: ``CHANGES`` of its numbers, dtype and shape, for every part of a folder."""

from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[Tensor], Tensor | None]


def _set(value: float) -> Change:
    """The last element of a float tensor; None of another."""

    def change(t: Tensor) -> Tensor | None:
        if not t.is_floating_point() or t.dtype.itemsize == 1:
            return None
        flat = t.flatten().clone()
        flat[-1] = value
        return flat.reshape(t.shape)

    return change


def _bytes(byte: int) -> Change:
    return lambda t: torch.full((t.nbytes,), byte, dtype=torch.uint8).view(t.dtype).reshape(t.shape)


def _last_byte(t: Tensor) -> Tensor:
    """All bits of the last byte set: the NaN of float8 and of powers of two, the greatest code, pad bits."""
    raw = t.contiguous().flatten().view(torch.uint8).clone()
    raw[-1] = 255
    return raw.view(t.dtype).reshape(t.shape)


def _noise(t: Tensor) -> Tensor:
    raw = torch.randint(256, (t.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return raw.view(t.dtype).reshape(t.shape)


def _as(dtype: torch.dtype) -> Change:
    return lambda t: None if t.dtype == dtype else t.to(torch.float32).to(dtype)


CHANGES: dict[str, Change] = {
    "NaN": _set(float("nan")),
    "inf": _set(float("inf")),
    "-inf": _set(float("-inf")),
    "negative": lambda t: -t.abs() if t.is_floating_point() and t.dtype.itemsize > 1 else None,
    "least": _set(1e-45),
    "zeros": _bytes(0),
    "all bits": _bytes(255),
    "last byte": _last_byte,
    "noise": _noise,
    **{
        str(d).removeprefix("torch."): _as(d)
        for d in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
                  torch.float8_e4m3fn, torch.bool)
    },
    "scalar": lambda t: t.flatten()[0] if t.ndim else None,
    "one number": lambda t: t.flatten()[:1],
    "one row": lambda t: t[:1] if t.ndim and len(t) > 1 else None,
    "one column": lambda t: t[..., :1] if t.ndim > 1 and t.shape[-1] > 1 else None,
    "a row less": lambda t: t[1:] if t.ndim else None,
    "a row more": lambda t: torch.cat([t, t[:1]]) if t.ndim else t.repeat(2),
    "a column more": lambda t: torch.cat([t, t[..., :1]], -1) if t.ndim > 1 else None,
    "flat": lambda t: t.flatten() if t.ndim != 1 else None,
    "deeper": lambda t: t.unsqueeze(0),
    "transposed": lambda t: t.transpose(0, 1).contiguous() if t.ndim > 1 and t.shape[0] != t.shape[1] else None,
    "empty": lambda t: t.flatten()[:0],
    "no rows": lambda t: t[:0] if t.ndim > 1 else None,
}  # fmt: skip

_CODES = "zeros, all bits, last byte, noise"
_SHAPED = "one row, one column, a row less, a row more, a column more, transposed"  # another weight, where a scale fits
_SCALE = "negative, least, zeros, noise, last byte"
_NUMBER = "scalar, one number, flat, deeper"  # ways to store one number
_GPTQ = {
    "qweight": f"{_CODES}, a row less",
    "qzeros": _CODES,
    "scales": f"{_SCALE}, float32",
    "g_idx": "int64, a row less",
}
# format -> part -> changes after which a folder may still mean something: all others must be refused
MAY_LOAD: dict[str, dict[str, str]] = {
    "compressed-tensors": {
        "weight": f"{_CODES}, {_SHAPED}",
        "weight_packed": f"{_CODES}, a column more",  # a word more a row: whole codes to a word
        "weight_scale": f"{_SCALE}, float32, {_NUMBER}",
        "weight_shape": "int32",
        "weight_zero_point": f"{_CODES}, {_NUMBER}",
        "weight_global_scale": f"least, {_NUMBER}",
        "input_scale": f"least, float16, {_NUMBER}",
        "input_zero_point": f"{_CODES}, {_NUMBER}",
    },
    "gptq": _GPTQ,
    "gptq_v2": _GPTQ,
    "awq": {"qweight": _CODES, "qzeros": _CODES, "scales": f"{_SCALE}, float32"},
    "bitsandbytes": {
        "weight": f"{_CODES}, int8, one column, a column more",
        "absmax": f"{_SCALE}, all bits",
        "nested_absmax": f"{_SCALE}, one number",
        "SCB": _SCALE,
        "weight_format": "gone, zeros",
    },
    "fp8": {
        "weight": f"zeros, {_SHAPED}",
        "weight_scale_inv": f"{_SCALE}, uint8, {_NUMBER}",
        "activation_scale": f"least, float16, {_NUMBER}",
        "": "zeros, a column more",
        "scale_inv": f"{_SCALE}, uint8",
    },
    "mxfp4": {"blocks": _CODES, "scales": "zeros, noise"},
    "hqq": {
        "W_q": _CODES,
        "scale": f"{_SCALE}, float32",
        "zero": f"{_SCALE}, float32",
        "nbits": "int64, float32",
        "group_size": "int64",
        "axis": "int64",
        "unpack_view_dtype": f"gone, {_CODES}, one number, one row, a row less, a row more, empty",
        "compute_dtype": "gone",
        **dict.fromkeys(("view_as_float", "quant_scale", "quant_zero"), "gone"),
        "channel_wise": f"gone, {_CODES}",
        **dict.fromkeys(
            ("offload_meta", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero"), f"gone, {_CODES}"
        ),
    },
    "torchao": {
        "qdata": f"{_CODES}, int8, uint8, deeper",
        "scale": f"{_SCALE}, float16, float32, float64, uint8, flat, deeper, transposed",
        "zero_point": f"{_SCALE}, all bits, uint8, int8, int32, int64, float16, float32, float64, bool, flat, deeper, "
        "transposed",
        "per_tensor_scale": f"{_SCALE}, float16, {_NUMBER}",
    },
}
