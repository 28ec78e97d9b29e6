"""torchao.optim.subclass_fp8: float8 states."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight.core.formats import E4M3, UFLOAT8
from pennyweight.core.tensor import AffineQuantizedTensor as QT

from .state_view import OptimState

__all__ = ["OptimStateFp8"]

DTYPE = torch.float8_e4m3fn


class OptimStateFp8(OptimState):
    """float8 state. codes: e4m3, of the shape of the state; scale: one float32 per block of the flattened state.

    The second moments of our float8 optimizers are instances too: they have 8 bits without a sign.
    """

    FORMATS: ClassVar = frozenset((E4M3, UFLOAT8))
    tensor_data_names: ClassVar[list[str]] = ["codes", "scale"]
    tensor_attribute_names: ClassVar[list[str]] = []

    @classmethod
    def build(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> QT:
        assert codes.dtype is DTYPE, f"OptimStateFp8: codes must be {DTYPE}, got {codes.dtype}"
        return cls.make(codes, scale, E4M3, codes.shape, dtype, "plain")

    @classmethod
    def zeros(
        cls, shape: torch.Size | tuple[int, ...] | int, block_size: int = 256,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """A state whose scales are zero."""
        codes = torch.zeros(shape, dtype=torch.float32, device=device).to(DTYPE)
        scale = torch.zeros(codes.numel() // block_size, dtype=torch.float32, device=device)
        return cls.build(codes, scale, dtype)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        """torchao's members of a state. Raises ValueError for one without float8 codes."""
        if w.spec.format is not E4M3:
            raise ValueError(f"OptimStateFp8: codes of {w.spec.format} are not float8")
        assert w.scale is not None
        return {"codes": w.codes, "scale": w.scale.reshape(-1), "dtype": w.dtype}
