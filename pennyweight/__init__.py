"""Pennyweight: small weights for PyTorch."""

__version__ = "0.1.0"

from .core.fallback import FallbackError, FallbackWarning, fallbacks, reset_fallbacks, strict
from .core.spec import ActivationSpec, QuantSpec
from .core.tensor import AffineQuantizedTensor
from .kernels import explain

__all__ = [
    "ActivationSpec",
    "AffineQuantizedTensor",
    "FallbackError",
    "FallbackWarning",
    "QuantSpec",
    "explain",
    "fallbacks",
    "reset_fallbacks",
    "strict",
]
