"""Quantized models over several processes: what PyTorch's own DTensor, FSDP2, DDP and checkpoints do not have."""

from .all_gather import QuantizedAllGather, quantized_all_gather_
from .compiling import compile
from .row_wise import RowwiseParallel
from .shards import broadcast_, load_, pack_, unpack_

__all__ = [
    "QuantizedAllGather", "RowwiseParallel", "broadcast_", "compile", "load_", "pack_", "quantized_all_gather_",
    "unpack_",
]  # fmt: skip
