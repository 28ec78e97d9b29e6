"""Optimizers whose state takes 8 or 4 bits a number: as torch.optim's, a quarter or an eighth of their memory."""

from .adam import Adam4bit, Adam8bit, AdamFp8, AdamW4bit, AdamW8bit, AdamWFp8
from .base import LowBitOptimizer
from .memory import Memory
from .momentum import Lion8bit, SGD8bit
from .offload import CPUOffloadOptimizer
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
