"""Tuners: each trains parameters of a quantized model so that its outputs match those of the float model."""
