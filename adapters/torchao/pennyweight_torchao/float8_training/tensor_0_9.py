"""torchao.float8.float8_tensor of releases up to 0.12: the training tensor under its first name."""

from __future__ import annotations

from .training_tensor import Float8TrainingTensor as Float8Tensor

__all__ = ["Float8Tensor"]
