"""Models at the speed of their kernels: frozen layers, fused transformer blocks."""

from .freeze import FrozenLinear, freeze_, thaw_
from .fuse import FusedBlock, fuse_
from .fused_linear import together

__all__ = ["FrozenLinear", "FusedBlock", "freeze_", "fuse_", "thaw_", "together"]
