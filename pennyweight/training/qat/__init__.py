"""Quantization-aware training: layers that compute as they will when they are quantized, on weights that are float."""
