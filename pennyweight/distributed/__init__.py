"""Distributed quantized models: additions to PyTorch's DTensor, FSDP2, DDP and distributed checkpoints."""

from .compile_patch import compile
from .quantized_all_gather import QuantizedAllGather, quantized_all_gather_
from .repack import broadcast_, load_, pack_, unpack_
from .rowwise_parallel import RowwiseParallel

__all__ = [
    "QuantizedAllGather", "RowwiseParallel", "broadcast_", "compile", "load_", "pack_", "quantized_all_gather_",
    "unpack_",
]  # fmt: skip
