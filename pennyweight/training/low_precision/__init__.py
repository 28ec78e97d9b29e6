"""Low-precision training: quantized matrix products in forward and backward, and quantized trainable weights."""
