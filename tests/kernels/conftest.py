"""Fixtures of the kernels' tests."""

from .fake_cuda import fake_cuda

__all__ = ["fake_cuda"]
