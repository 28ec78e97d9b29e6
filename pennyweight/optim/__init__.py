"""Optimizers with 8-bit or 4-bit states: drop-in for torch.optim's, at a quarter or an eighth of the state memory."""

from .base import LowBitOptimizer, Memory
from .offload import CPUOffloadOptimizer
from .optimizers import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8, Lion8bit, SGD8bit
from .parq import ProximalOptimizer, PruneOptimizer, QuantOptimizer

__all__ = [
    "Adam4bit",
    "Adam8bit",
    "AdamFp8",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWFp8",
    "CPUOffloadOptimizer",
    "Lion8bit",
    "LowBitOptimizer",
    "Memory",
    "ProximalOptimizer",
    "PruneOptimizer",
    "QuantOptimizer",
    "SGD8bit",
]
