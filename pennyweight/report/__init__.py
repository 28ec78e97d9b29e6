"""Measures quantization loss: metrics of outputs and layers, golden outputs, HTML reports."""

from .compare_models import assert_kl, compare
from .comparison import Comparison, Layer, Perplexity
from .golden_outputs import Golden, Verification, golden, verify

__all__ = [
    "Comparison", "Golden", "Layer", "Perplexity", "Verification", "assert_kl", "compare", "golden", "verify",
]  # fmt: skip
