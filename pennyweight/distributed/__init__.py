"""Distributed quantized models: additions to PyTorch's DTensor, FSDP2, DDP and distributed checkpoints.

The names are imported at first use: they load torch.distributed.fsdp and tensor.parallel, which the helpers that
quantize_ and training import from this folder do not need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .quantized_all_gather import QuantizedAllGather, quantized_all_gather_
    from .repack import broadcast_, load_, pack_, unpack_
    from .tensor_parallel import RowwiseParallel, compile

__all__ = [
    "QuantizedAllGather", "RowwiseParallel", "broadcast_", "compile", "load_", "pack_", "quantized_all_gather_",
    "unpack_",
]  # fmt: skip
_MODULES = (".repack", ".tensor_parallel", ".quantized_all_gather")


def __getattr__(name: str) -> Any:
    if f".{name}" in _MODULES:
        return import_module(f".{name}", __name__)
    if name in __all__:
        for path in _MODULES:
            module = import_module(path, __name__)
            if hasattr(module, name):
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
