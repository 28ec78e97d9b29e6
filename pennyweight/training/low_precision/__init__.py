"""Products of quantized operands, forward and backward; weights that are quantized while they are trained."""
