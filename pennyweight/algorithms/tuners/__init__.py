"""Tuners: each trains parameters of a quantized model to match the outputs of the float model."""
