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
