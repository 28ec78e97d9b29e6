"""Quantization-aware training (QAT): layers with float weights compute as they will after quantization."""
