"""Quantized all-gather for FSDP2: float shards, but trainable parameters are communicated in low precision."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..core.formats import INT8
from ..core.layouts import get_layout, portable_layout
from ..core.numerics import Parts, quantize
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from .rank_check import part_tensors

INT8_128 = QuantSpec(INT8, (128,))
# torch 2.11 has it under its former name, which later releases deprecate
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class QuantizedAllGather:
    """Argument of ``FSDPModule.set_custom_all_gather``: quantizes the flat buffer of a parameter group for all-gather.

    spec    spec of the flat buffer (default: int8, 128 elements per float32 scale, 1.03 bytes per element)
    least   smaller buffers are not quantized

    Every rank computes with the same rounded parameters, including its own shard; the shards themselves are not
    rounded, and gradients and optimizer use them. Buffers of bytes (quantized parameters next to floats, see
    docs/distributed.md) or integers are sent unchanged. ``sent`` and ``plain`` count the bytes that this rank sent, and
    their unquantized size. NaN or inf in a block makes the whole block NaN on every rank.
    """

    def __init__(self, spec: QuantSpec = INT8_128, least: int = 4096) -> None:
        if spec.block is None or len(spec.block) != 1 or spec.block[0] < 1 or spec.table_shape is not None:
            raise ValueError(f"{spec}: a flat buffer needs a one-dimensional block, such as QuantSpec(INT8, (128,))")
        self.spec, self.least = spec.with_(layout=portable_layout(spec)), least
        self.sent = self.plain = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the whole buffer; FSDP2 fills this rank's part."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather ``input_tensor`` of all ranks into ``output_tensor``. Blocks, even with async_op."""
        self.plain += input_tensor.nbytes
        if not input_tensor.is_floating_point() or input_tensor.numel() < self.least:
            self.sent += input_tensor.nbytes
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        own = self._quantized(input_tensor)
        raw = torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in part_tensors(own)])
        count = output_tensor.numel() // max(1, input_tensor.numel())
        everyone = torch.empty(count * raw.numel(), dtype=torch.uint8, device=raw.device)
        _gather(everyone, raw, group=group)
        self.sent += raw.nbytes
        output_tensor.view(count, -1).copy_(self._values(own, everyone.view(count, -1)).view(count, -1))
        return None

    def _quantized(self, x: Tensor) -> AffineQuantizedTensor:
        x = x.view(1, -1)
        spec = self.spec.with_(layout="plain")
        parts = quantize(x.masked_fill(~torch.isfinite(x), math.nan), spec)
        parts = get_layout(self.spec.layout).pack(parts, self.spec, x.shape)
        return AffineQuantizedTensor(parts, self.spec, x.shape, x.dtype)

    def _values(self, like: AffineQuantizedTensor, raw: Tensor) -> Tensor:
        """Dequantize the bytes of all ranks to floats [ranks, elements]."""
        at = 0

        def read(w: AffineQuantizedTensor) -> Parts:
            nonlocal at
            slots: dict[str, Any] = {}
            for name, p in w.parts._asdict().items():
                if isinstance(p, AffineQuantizedTensor):
                    slots[name] = read(p)
                elif p is not None:
                    size = p.numel() * p.element_size()
                    piece = raw[:, at : at + size].contiguous().view(p.dtype)
                    slots[name] = piece.view(raw.shape[0], *p.shape[1:])
                    at += size
            return Parts(**slots)

        shape = (raw.shape[0], like.shape[1])
        return AffineQuantizedTensor(read(like), self.spec, shape, like.dtype)._dequantize(like.dtype)


def quantized_all_gather_(model: nn.Module, spec: QuantSpec = INT8_128, least: int = 4096) -> QuantizedAllGather:
    """Quantize the all-gather of float parameters of every fully sharded module. Returns the object that counts bytes.

    Raises ValueError if fully_shard was not applied to any module.
    """
    gather = QuantizedAllGather(spec, least)
    found = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no fully sharded module; call fully_shard(model) first")
    for module in found:
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]
    return gather
