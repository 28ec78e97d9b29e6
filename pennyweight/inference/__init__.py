"""Models at the speed of their kernels: frozen layers, fused transformer blocks."""

from .check_block import CheckError, checked
from .freeze import FrozenLinear, freeze_, thaw_
from .fuse import FusedBlock, fuse_
from .fused_linear import together

__all__ = ["CheckError", "FrozenLinear", "FusedBlock", "checked", "freeze_", "fuse_", "thaw_", "together"]
