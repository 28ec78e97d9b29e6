"""Models at the speed of their kernels: frozen layers, fused transformer blocks."""

from .explain_model import LayerKernel, ModelExplanation, explain
from .freeze import FrozenLinear, freeze_, thaw_
from .fuse import FusedBlock, fuse_
from .fused_linear import together
from .recommend_config import recommend
from .recommendation import Candidate, Recommendation
from .verify_block import CheckError, checked

__all__ = [
    "Candidate", "CheckError", "FrozenLinear", "FusedBlock", "LayerKernel", "ModelExplanation", "Recommendation",
    "checked", "explain", "freeze_", "fuse_", "recommend", "thaw_", "together",
]  # fmt: skip
